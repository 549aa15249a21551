"""A worker whose ranks share its device as if each had a card: `python -m bench.tools.worker_apart
decode ...`, with the flags of `baton decode`.

Each rank has a KV pool and a transport end of its own, and ranks reach each other by gloo. Such
workers are slow; only tests and checks of the logic start them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from decode_worker.main import main as run_decode
from engine.device import pick_device
from prefill_worker.main import main as run_prefill
from worker.settings import WorkerSettings
from worker.startup import model_loading
from worker.startup.card_plan import Cards


def shared_device(settings: WorkerSettings, folder: Path, cards: Cards) -> tuple[str, ...]:
    """In the place of `devices_of_ranks`: the worker's device, for each of its ranks."""
    return (str(pick_device(settings.device)),) * settings.num_ranks


def main(argv: Sequence[str]) -> int:
    """Run a worker of the role that comes first; returns its exit status."""
    role, *flags = argv
    model_loading.devices_of_ranks = shared_device  # type: ignore[attr-defined]
    return {"prefill": run_prefill, "decode": run_decode}[role](flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
