"""Threads for work on texts, in fair turns of the callers whose texts they are.

Work that would hold up the event loop runs here: rendering, encoding, grammars, JSON. Long work
comes in steps, and other callers get their turns between slices of it. See `http_kit.turnstile`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from http_kit.turnstile import Standing, Turn, Turnstile

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Work that may be interrupted where it yields; returns its result."""
SLICE_S = 0.05
_LEAST_S = 0.002


class FairThreads:
    """Runs `num_threads` jobs at once. Owns its threads (`close`), or uses those of the event loop.

    `s_per_char` predicts how long a job takes, in seconds for each character or byte.
    """

    def __init__(self, num_threads: int, s_per_char: float, name: str | None = None) -> None:
        """Starts threads with this `name`; without one, uses those of the event loop."""
        self._num_threads = num_threads
        self._s_per_char = s_per_char
        self._executor = None if name is None else ThreadPoolExecutor(num_threads, name)
        self._turnstiles: WeakKeyDictionary[asyncio.AbstractEventLoop, Turnstile] = (
            WeakKeyDictionary()
        )

    def close(self) -> None:
        """Stop the threads after the jobs that are running."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    @property
    def turnstile(self) -> Turnstile:
        """The turnstile of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._turnstiles.get(loop)
        if found is None:
            found = self._turnstiles[loop] = Turnstile(self._num_threads)
        return found

    async def run(
        self, work: Callable[[], _T], num_chars: int, standing: Standing = Standing.NEW
    ) -> _T:
        """The result of work on `num_chars` characters. Raises as `Turnstile.enter`."""
        return await self._run(work, _LEAST_S + num_chars * self._s_per_char, standing)

    async def run_steps(self, steps: Steps[_T], num_chars: int) -> _T:
        """The result of work on `num_chars` characters, a slice at a time."""
        predicted_s, standing = _LEAST_S + num_chars * self._s_per_char, Standing.NEW
        while True:
            ended = await self._run(partial(_advance, steps), predicted_s, standing)
            if ended is not None:
                return ended.result
            predicted_s, standing = SLICE_S, Standing.BEGUN

    def start(self, work: Callable[[], None]) -> None:
        """Run work in a thread, without waiting for its result or for a turn."""
        assert self._executor is not None, "the event loop's threads have no such work"
        self._executor.submit(work)

    async def _run(self, work: Callable[[], _T], predicted_s: float, standing: Standing) -> _T:
        turnstile = self.turnstile
        turn = await turnstile.enter(predicted_s, standing)
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._executor, copy_context().run, work)
        try:
            return await asyncio.shield(running)
        finally:
            if running.done():
                turnstile.leave(turn)
            else:  # no task waits for the job any more, but its thread is still busy
                running.add_done_callback(partial(_leave_late, turnstile, turn))


@dataclass(frozen=True)
class _Ended(Generic[_T]):
    """The end of work that comes in steps."""

    result: _T


def all_steps(steps: Steps[_T]) -> _T:
    """The result of work that comes in steps, at once."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: _T = stop.value
            return result


def _advance(steps: Steps[_T]) -> _Ended[_T] | None:
    """Take steps for a slice of time; None if there are more."""
    end = time.perf_counter() + SLICE_S
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return _Ended(stop.value)
        if time.perf_counter() >= end:
            return None


def _leave_late(turnstile: Turnstile, turn: Turn, running: asyncio.Future[Any]) -> None:
    turnstile.leave(turn)
    if not running.cancelled():
        running.exception()  # the exception was for a client that is gone
