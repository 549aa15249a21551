"""How much of a share's work is more urgent than a request, and so overtakes it while it waits.

Pure. A worker computes the prompts of a share by priority, so urgent prompts that come later pass
those that wait. This module counts the prompt tokens of each priority that were lately sent to
workers. Bounded: the shares that were longest without a request are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

HALF_LIFE = 32
"""The number of later requests of a share after which a request counts half."""
MOST_SHARES = 1024


class _Work:
    """The tokens of one share, by priority, and its requests since the tokens were halved."""

    __slots__ = ("num_requests", "tokens")

    def __init__(self) -> None:
        self.num_requests = 0
        self.tokens: dict[int, float] = {}


class UrgentWork:
    """The prompts that were lately sent to workers. `len` is the number of known shares."""

    def __init__(self) -> None:
        self._shares: OrderedDict[str, _Work] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shares)

    def note(self, share: str, priority: int, num_tokens: int) -> None:
        """Note that a prompt was sent, of which a worker computes `num_tokens`."""
        work = self._shares.get(share)
        if work is None:
            work = self._shares[share] = _Work()
            if len(self._shares) > MOST_SHARES:
                self._shares.popitem(last=False)
        self._shares.move_to_end(share)
        work.tokens[priority] = work.tokens.get(priority, 0.0) + num_tokens
        work.num_requests += 1
        if work.num_requests == HALF_LIFE:
            work.num_requests = 0
            work.tokens = {at: each / 2 for at, each in work.tokens.items() if each >= 1}

    def left_for(self, share: str, priority: int) -> float:
        """A ratio of at most 1 for a request with this priority: its time to the first token if no
        more urgent requests came, divided by that time with the urgent requests that are still to
        come.

        With a share f of urgent work, this is `1 / (1 + f * f)`: urgent requests come at the rate
        f, and find the workers full in about the same share f of cases. Without the square, the
        simulator refuses too many requests at loads that the fleet can nearly serve.
        """
        work = self._shares.get(share)
        if work is None:
            return 1.0
        urgent = sum([each for at, each in work.tokens.items() if at > priority])
        if not urgent:
            return 1.0
        return 1.0 / (1.0 + (urgent / sum(work.tokens.values())) ** 2)
