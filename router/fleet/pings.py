"""The pings that a router sends a worker: their numbers, their answers, and the tasks that wait for
answers.

Estimates the worker's clock from the times of the answers. Knows no sockets.
"""

from __future__ import annotations

import asyncio

from process.clock import wall_us
from protocol.messages import Ping, Pong
from router.fleet.clock_offset import ClockOffset

_NUM_TIMED = 64


class Pings:
    """The pings of one link, numbered from 1 over all of its sessions."""

    def __init__(self) -> None:
        self.clock = ClockOffset()
        self.num_sent = 0
        self.last_answered = 0
        self._sent_us: dict[int, int] = {}  # by number of ping, until it is answered
        self._waiters: dict[asyncio.Future[None], int] = {}  # with the awaited number

    def next(self) -> Ping:
        """The next ping."""
        self.num_sent += 1
        return Ping(nonce=self.num_sent)

    def sent(self, ping: Ping) -> None:
        """Note that the ping leaves now."""
        self._sent_us[ping.nonce] = wall_us()
        self._sent_us.pop(ping.nonce - _NUM_TIMED, None)

    def answered(self, pong: Pong) -> None:
        """Take an answer, which also stands for all earlier ones."""
        sent_us = self._sent_us.pop(pong.nonce, 0)
        if sent_us and pong.wall_us:
            self.clock.observe(sent_us, pong.wall_us, wall_us())
        self.last_answered = max(self.last_answered, pong.nonce)
        self._release(self.last_answered)

    async def wait(self, number: int, timeout_s: float) -> None:
        """Wait until this ping or a later one is answered, `release_all`, or the timeout."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = number
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            del self._waiters[waiter]

    def release_all(self) -> None:
        """Release every waiter, because the connection is lost."""
        self._release(self.num_sent)

    def _release(self, number: int) -> None:
        for waiter, asked in self._waiters.items():
            if asked <= number and not waiter.done():
                waiter.set_result(None)
