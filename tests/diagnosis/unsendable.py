"""A worker whose writes of KV blocks all fail: `python -m tests.diagnosis.unsendable ROLE ...`.

Runs the real worker; only the transports refuse to post writes.
"""

from __future__ import annotations

import sys
from typing import Any

from cli.commands import COMMANDS
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.shm import ShmTransport
from protocol.errors import TransferError


def main(arguments: list[str]) -> int:
    """The role's own main, with transports that fail."""
    for transport in (NixlTransport, ShmTransport):
        transport.post_write = _refuse  # type: ignore[method-assign]
    return COMMANDS[arguments[0]].load_main()(arguments[1:])


def _refuse(*_: Any) -> int:
    raise TransferError("the write failed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
