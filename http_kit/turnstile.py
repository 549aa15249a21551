"""Gives a number of places for work to waiting requests, in fair turns of their callers.

It stands before threads that all callers share. A flood of one caller delays another caller's job
by about one job; see `scheduling.shares`. Work is predicted in seconds, and corrected when it is
done. A caller with too much waiting work is refused. When a client leaves, its waiting job is
dropped. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from http_kit.caller import CURRENT_ORIGIN, Origin
from http_kit.disconnect import ClientGone
from protocol.errors import TooManyRequests, retry_after
from scheduling.shares import ShareAccounts

MOST_WAIT_S = 60.0
"""Predicted seconds of work that may wait for one caller."""
_OWN_WORK = Origin(0)


class Standing(enum.Enum):
    """How far a request has come. At first its work may be refused. Once it has begun, it ends
    early only if its client leaves. Work for an answer is ended only by the task that sends the
    answer."""

    NEW = enum.auto()
    BEGUN = enum.auto()
    ANSWERING = enum.auto()


@dataclass(eq=False, slots=True)
class Turn:
    """One job. `granted` exists if it had to wait; `started_at` is set once it has a place."""

    share: str
    predicted_s: float
    is_answer: bool
    order: int = 0
    granted: asyncio.Future[None] | None = None
    started_at: float | None = None

    def on_lost(self) -> None:
        """The client is gone: wait no longer."""
        if self.granted is not None and not self.granted.done():
            self.granted.set_exception(ClientGone())


class Turnstile:
    """Owns the places. Waiting jobs belong to requests that the gates have admitted."""

    def __init__(self, places: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` is monotonic, in seconds."""
        self._places = self._free = places
        self._clock = clock
        self._accounts = ShareAccounts()
        self._waiting: dict[str, deque[Turn]] = {}  # by share; no queue is empty
        self._waiting_s: dict[str, float] = {}
        self._order = count()

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for a place."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(
        self, predicted_s: float, standing: Standing = Standing.NEW
    ) -> AsyncIterator[None]:
        """A context in which the current request has a place. Raises as `enter`."""
        turn = await self.enter(predicted_s, standing)
        try:
            yield
        finally:
            self.leave(turn)

    async def enter(self, predicted_s: float, standing: Standing = Standing.NEW) -> Turn:
        """Wait for a place for the current request, until `leave`. Raises TooManyRequests if too
        much waits for its caller, and ClientGone if its client is gone or leaves meanwhile."""
        origin = CURRENT_ORIGIN.get() or _OWN_WORK
        connection = None if standing is Standing.ANSWERING else origin.connection
        if connection is not None and connection.is_lost:
            raise ClientGone
        turn = Turn(origin.share, predicted_s, standing is Standing.ANSWERING)
        self._accounts.join(turn.share)
        if self._free and not self._waiting:
            self._start(turn)
            return turn
        if standing is Standing.NEW:
            self._check(turn)
        granted = self._append(turn)
        if connection is not None:
            connection.watch(turn.on_lost)
        try:
            await granted
        except BaseException:
            if turn.started_at is None:
                self._remove(turn)
            else:
                self.leave(turn)
            raise
        finally:
            if connection is not None:
                connection.unwatch(turn.on_lost)
        return turn

    def leave(self, turn: Turn) -> None:
        """End a turn, whose work is done: another turn gets its place."""
        assert turn.started_at is not None
        self._accounts.charge(turn.share, self._clock() - turn.started_at - turn.predicted_s)
        self._accounts.forget_idle(self._waiting)
        self._free += 1
        while self._free and self._waiting:
            following = self._waiting[min(self._waiting, key=self._rank)][0]
            assert following.granted is not None
            self._remove(following)
            if not following.granted.done():  # otherwise its client has just left
                self._start(following)
                following.granted.set_result(None)

    def _check(self, turn: Turn) -> None:
        """Raises TooManyRequests, except for the router's own work, and a first long job."""
        waiting_s = self._waiting_s.get(turn.share, 0.0)
        if not turn.share or not waiting_s or waiting_s + turn.predicted_s <= MOST_WAIT_S:
            return
        retry_s = retry_after(waiting_s * len(self._waiting) / self._places)
        raise TooManyRequests(
            f"texts of this caller wait that take about {waiting_s:.0f} s to convert; try again in "
            f"{retry_s} s",
            retry_s,
        )

    def _append(self, turn: Turn) -> asyncio.Future[None]:
        turn.granted = asyncio.get_running_loop().create_future()
        turn.order = next(self._order)
        queue = self._waiting.setdefault(turn.share, deque())
        if turn.is_answer:
            queue.appendleft(turn)
        else:
            queue.append(turn)
        self._waiting_s[turn.share] = self._waiting_s.get(turn.share, 0.0) + turn.predicted_s
        return turn.granted

    def _start(self, turn: Turn) -> None:
        self._free -= 1
        self._accounts.admit(turn.share)
        self._accounts.charge(turn.share, turn.predicted_s)
        turn.started_at = self._clock()

    def _remove(self, turn: Turn) -> None:
        queue = self._waiting.get(turn.share)
        if queue is None or turn not in queue:
            return
        queue.remove(turn)
        self._waiting_s[turn.share] -= turn.predicted_s
        if not queue:
            del self._waiting[turn.share], self._waiting_s[turn.share]

    def _rank(self, share: str) -> tuple[float, int]:
        return self._accounts.had(share), self._waiting[share][0].order
