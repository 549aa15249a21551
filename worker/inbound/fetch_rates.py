"""How fast each peer's cached blocks come here: averages of this worker's own fetches.

Pure. A measurement counts less as it ages, so that a peer that was slow once is tried again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduling.fetch_rule import PairCost

TURN_S = 0.005
CONNECT_S = 0.01
WEIGHT = 0.3
"""The weight of a new measurement."""
HALF_LIFE_S = 30.0
MAX_PAIRS = 1024
"""The most pairs; beyond that the oldest is forgotten, since peers come and go."""
_GB = 1e9
_BYTES_PER_S = (("rdma", 10 * _GB), ("tcp", 1 * _GB))


def usual_speed(paths: str) -> float:
    """Bytes per second to expect of a transport whose paths have these names: the fastest path is
    shared memory or a copy between processes, if workers share a machine."""
    named = paths.lower()
    return next((speed for name, speed in _BYTES_PER_S if name in named), 4 * _GB)


@dataclass
class _Pair:
    turn_s: float
    bytes_per_s: float
    found_share: float
    measured_at: float
    has_connected: bool = False


class FetchPairs:
    """The measurements by the peer's incarnation."""

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s` is the assumed speed of pairs that were not measured yet."""
        self._bytes_per_s = bytes_per_s
        self._pairs: dict[str, _Pair] = {}

    def cost(self, peer: str, now: float) -> PairCost:
        """The expected cost of a fetch."""
        pair = self._pairs.get(peer)
        if pair is None:
            return PairCost(TURN_S, self._bytes_per_s, 1.0, CONNECT_S)
        trust = 0.5 ** ((now - pair.measured_at) / HALF_LIFE_S)
        usual = PairCost(TURN_S, self._bytes_per_s)
        speed = math.exp(_mix(math.log(usual.bytes_per_s), math.log(pair.bytes_per_s), trust))
        return PairCost(
            _mix(usual.turn_s, pair.turn_s, trust),
            speed,
            _mix(usual.found_share, pair.found_share, trust),
            0.0 if pair.has_connected else CONNECT_S,
        )

    def note_found(self, peer: str, num_found: int, num_asked: int, now: float) -> None:
        """Note that the peer had `num_found` of `num_asked` blocks."""
        pair = self._pair(peer, now)
        pair.found_share = _mix(pair.found_share, num_found / num_asked, WEIGHT)

    def note_turn(self, peer: str, turn_s: float, now: float) -> None:
        """Note how long the peer took, without writing. The first fetch of a pair also opens the
        connection between the pools, so it teaches nothing about the next ones."""
        pair = self._pair(peer, now)
        if pair.has_connected:
            pair.turn_s = _mix(pair.turn_s, max(0.0, turn_s), WEIGHT)
        pair.has_connected = True

    def note_speed(self, peer: str, num_bytes: int, seconds: float, now: float) -> None:
        """Note that the peer has written these bytes in this time."""
        pair = self._pair(peer, now)
        speed = num_bytes / max(seconds, 1e-6)
        mixed = _mix(math.log(pair.bytes_per_s), math.log(speed), WEIGHT)
        pair.bytes_per_s = math.exp(mixed)

    def _pair(self, peer: str, now: float) -> _Pair:
        cost = self.cost(peer, now)
        if peer not in self._pairs and len(self._pairs) >= MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        pair = self._pairs.setdefault(peer, _Pair(cost.turn_s, cost.bytes_per_s, 1.0, now))
        pair.turn_s, pair.bytes_per_s = cost.turn_s, cost.bytes_per_s
        pair.found_share, pair.measured_at = cost.found_share, now
        return pair


def _mix(old: float, new: float, weight: float) -> float:
    return old + (new - old) * weight
