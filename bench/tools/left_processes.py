"""Kills what a benchmark leaves behind if it is killed, also processes that are stopped.

`python left_processes.py` reads pids from its standard input, one a line. The benchmark holds the
other end of that pipe, so the input ends with the benchmark, however it ends. Then this program
kills those of the processes that still run, with all their descendants. They do not have to watch
their parent, which a stopped process could not do.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable

import psutil


def main(lines: Iterable[str]) -> int:
    """Read pids until the input ends; then kill what is left of their processes."""
    started = []
    for line in lines:
        with contextlib.suppress(psutil.NoSuchProcess):
            started.append(psutil.Process(int(line)))
    trees = [each for process in started for each in _tree(process)]
    for process in trees:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return 0


def _tree(process: psutil.Process) -> list[psutil.Process]:
    """The process with its descendants; empty if it has ended, even if its pid is used again."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


if __name__ == "__main__":
    sys.exit(main(sys.stdin))
