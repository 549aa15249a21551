"""How long a router waits before it places a request, so that routers do not all place at once.

Pure. Requests often come at nearly the same moment. Routers that place them then do not know of
each other's choice, because a message about it takes about half a millisecond, and they choose the
same worker. So they take turns: a router waits for its rank times `TURN_S`, and the messages of
those before it arrive meanwhile. Routers wait only where prompts are so long that a turn does not
count. A router that is alone never waits.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.routing.prediction import US_PER_MS
from router.routing.sent_requests import SentRequests

TURN_S = 0.001
"""A turn: the time of a message between routers, with some to spare."""
MOST_SHARE = 0.04
"""The longest wait, as a share of the time to compute an average prompt of other routers."""
HALF_LIFE = 32
"""A prompt counts half in the average once this many others have followed."""
_KEPT = 0.5 ** (1 / HALF_LIFE)


class Stagger:
    """The turns of one router. `rank` is its place among the routers, from 0 on."""

    def __init__(self) -> None:
        self.rank = 0
        self._tokens = self._weight = 0.0

    def note_told(self, sent: Iterable[SentRequests]) -> None:
        """Note the prompts that another router has sent."""
        for each in sent:
            for request in each.requests:
                if request.tokens:
                    self._tokens = _KEPT * self._tokens + request.tokens
                    self._weight = _KEPT * self._weight + 1.0

    def wait_s(self, token_us: float) -> float:
        """How long to wait before the next placement, if a prompt token takes `token_us`. Routers
        share turns if there are more routers than turns."""
        if not self._weight:
            return 0.0
        prompt_s = self._tokens / self._weight * token_us / US_PER_MS / 1000
        return self.rank % (1 + int(MOST_SHARE * prompt_s / TURN_S)) * TURN_S
