"""Where `baton` starts: ready to be stopped before anything is imported.

As PID 1 of a container, a process without a handler never sees SIGTERM, and imports take seconds.
Until a command handles signals itself, nothing that needs closing is open, so SIGTERM may end the
process at once. That is success for a command that serves until it is stopped, and failure for any
other, whose work is not done.
"""

import os
import signal
import sys
from types import FrameType

_INTERRUPTED, _TERMINATED = 130, 143
_SERVING = ("up", "router", "prefill", "decode", "store")


def main() -> int:
    """Run one command; returns the process's exit code."""
    signal.signal(signal.SIGTERM, _end)
    try:
        from cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return _INTERRUPTED


def _end(number: int, frame: FrameType | None) -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    os._exit(0 if command in _SERVING else _TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
