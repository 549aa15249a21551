"""A trial's child that fails in the way that its folder's name says."""

import os
import sys
from pathlib import Path

from checkpoint.trial import limit_this_process, run_steps
from protocol.errors import ModelLoadError


def fail(folder: Path) -> None:
    match folder.name:
        case "loops":
            while True:
                pass
        case "sleeps":
            os.read(os.pipe()[0], 1)
        case "grows":
            "x" * (100 << 30)
        case "aborts":
            os.abort()
        case "exits":
            os._exit(3)
        case "raises":
            raise ModelLoadError(f"{folder}: a\nb\x1b[2J")
        case "panics":
            raise BaseException("a\nb")
        case "recurses":
            fail(folder)
        case "tells":
            raise ModelLoadError(f"{folder}: {sorted(n for n in os.environ if 'BATON' in n)}")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print("noise", file=sys.stderr)
    limit_this_process()
    sys.exit(run_steps((folder / "file", lambda: fail(folder))))
