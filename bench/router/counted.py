"""A router that counts its calls of Python functions: a SIGUSR2 begins the count, the next ends it.

    python -m bench.router.counted FILE FLAGS

Removes FILE when it begins, and writes the calls of each function to it at the end, as JSON.
`bench.router.calls` reads it.
"""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec

from router_process.main import main


def switch_of_counting(file: Path) -> Callable[..., None]:
    """A function that begins to count this thread's calls, and at its next call writes them."""
    counts: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            counts[frame.f_code] += 1

    def switch(*_: Any) -> None:
        if sys.getprofile() is None:
            counts.clear()
            file.unlink()
            sys.setprofile(count)
            return
        sys.setprofile(None)
        named = {f"{e.co_filename}:{e.co_firstlineno}": num for e, num in counts.items()}
        unfinished = file.with_suffix(".part")
        unfinished.write_bytes(msgspec.json.encode(named))
        unfinished.rename(file)

    return switch


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, switch_of_counting(Path(sys.argv[1])))
    sys.exit(main(sys.argv[2:]))
