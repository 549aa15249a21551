"""Where `baton` starts: ready to be stopped before anything is imported.

As PID 1 of a container, a process without a handler never sees SIGTERM, and imports take seconds.
Until a command handles signals itself, nothing that needs closing is open, so SIGTERM may end the
process at once. That is success for what serves, and failure for what was to give a result.
"""

import os
import signal
import sys
from types import FrameType

_INTERRUPTED, _TERMINATED = 130, 143
_GIVE_RESULTS = ("plan", "simulate", "tune")


def main() -> int:
    """Run one command; returns the process's exit code."""
    signal.signal(signal.SIGTERM, _end)
    try:
        from cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return _INTERRUPTED


def _end(number: int, frame: FrameType | None) -> None:
    gives_result = len(sys.argv) > 1 and sys.argv[1] in _GIVE_RESULTS
    os._exit(_TERMINATED if gives_result else 0)


if __name__ == "__main__":
    sys.exit(main())
