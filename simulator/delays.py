"""The delays of a simulated fleet besides steps and transfers: constants, or draws from measured
ones.

Where routers and workers share cores, a message waits for a core while workers compute. So measured
delays are kept by the number of workers that compute. Pure, but for the random generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from process.sockets.message_budget import PERIOD_S

ByComputing = tuple[tuple[float, ...], ...]
"""Measured delays in seconds, by the number of workers whose steps are under way; the last ones
hold for higher numbers, too."""


@dataclass(frozen=True)
class MeasuredDelays:
    """Measured delays, each equally likely.

    - `placing`: from the client's sending until the request is placed.
    - `sending`: from there until a worker without steps begins to compute the prompt.
    - `first`, `last`: from the end of the step that gave the first or the last token until the
      client has this token.

    All but `placing` are kept by the number of *other* workers that compute.
    """

    placing: ByComputing
    sending: ByComputing
    first: ByComputing
    last: ByComputing


@dataclass(frozen=True)
class Delays:
    """The delays besides steps and transfers, in seconds.

    - `message_s`: a message between router and worker.
    - `request_s`, `request_token_s`: from the client's sending until the request is placed, and
      what each token of its prompt adds; `answer_s`: from the router to the client.
    - `report_s`: the least time between two reports of a worker's load.
    - `tell_s`: the mean time between two messages in which a router tells the others what it has
      sent, if there is anything to tell; 0: it tells nothing. A message goes through the store, in
      twice `message_s`.
    - `measured`, if given, replaces these times for requests and tokens. Messages between workers
      and reports keep `message_s`.
    """

    message_s: float = 2e-4
    request_s: float = 0.0
    request_token_s: float = 0.0
    answer_s: float = 0.0
    report_s: float = 0.1
    tell_s: float = PERIOD_S
    measured: MeasuredDelays | None = None


USUAL_DELAYS = Delays()


class DelayDraws:
    """The delays of one router's messages. `num_computing` counts the workers whose steps are under
    way, besides the one with this name."""

    def __init__(
        self, delays: Delays, rng: random.Random, num_computing: Callable[[str], int]
    ) -> None:
        self._delays = delays
        self._measured = delays.measured
        self._rng = rng
        self._num_computing = num_computing

    def placing_s(self, num_prompt: int) -> float:
        """From the client's sending until the request is placed."""
        if self._measured is not None:
            return self._draw(self._measured.placing, "")
        return self._delays.request_s + self._delays.request_token_s * num_prompt

    def sending_s(self, worker: str) -> float:
        """From the placement until a worker has the request."""
        if self._measured is not None:
            return self._draw(self._measured.sending, worker)
        return self._delays.message_s

    def answering_s(self, worker: str, is_last: bool) -> float:
        """From the arrival of a worker's first or last token at the router until the client has
        the token."""
        if self._measured is not None:
            measured = self._measured.last if is_last else self._measured.first
            return max(0.0, self._draw(measured, worker) - self._delays.message_s)
        return self._delays.answer_s

    def _draw(self, measured: ByComputing, worker: str) -> float:
        number = min(self._num_computing(worker), len(measured) - 1)
        return self._rng.choice(measured[number])
