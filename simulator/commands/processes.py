"""Processes for simulations. They end with the command that started them, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess


@contextmanager
def simulation_processes(count: int, begin: Callable[[], None]) -> Iterator[Executor]:
    """`count` processes, which first call `begin`; none is left when the context ends. An error or
    a signal in the context ends them at once."""
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(count, _Context(), _begin, (begin,))
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


class _Process(SpawnProcess):
    """Leaves Ctrl-C to the parent, also while it imports."""

    def start(self) -> None:
        """See Process."""
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()  # it inherits the mask
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)


class _Context(SpawnContext):
    Process = _Process


def _begin(begin: Callable[[], None]) -> None:
    """End when the parent ends, even if it was killed."""
    threading.Thread(target=_end_with_parent, name="baton-parent", daemon=True).start()
    begin()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
