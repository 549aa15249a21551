"""How fast KV moves between each pair of workers, what is under way there, and which pairs cannot
hand over.

Pure. Owns the averages of measured transfers, from one worker to another, and the blocks that
placements are about to move. Pairs that were not measured count as the typical measured one. The
older a measurement is, the more its pair counts as the typical one, so a pair that was slow once is
tried again. If some layers keep windows, blocks of other groups count by their bytes, as a number
of blocks of the first group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp2

from protocol.registration import KeptWindow, WorkerInfo
from router.routing.barriers import Barriers
from router.routing.pace import HALF_LIFE_US
from router.routing.worker_view import Reservation

WEIGHT = 0.3
"""The weight of a new measurement."""
HALF_LIFE_S = HALF_LIFE_US / 1e6
"""A measurement is believed half as much after this time."""
MOST_PAIRS = 1 << 14
"""Most pairs; beyond that, the one that was measured longest ago is forgotten."""


@dataclass(eq=False)
class Pair:
    """One direction between two workers. Owns the reservations of blocks that are about to move."""

    ms_per_block: float | None = None
    measured_at: float = 0.0
    blocks_under_way: int = 0
    _reserved: set[Reservation] = field(default_factory=set)

    def reserve(self, blocks: int) -> Reservation:
        """Note that blocks begin to move."""
        reservation = Reservation(0, blocks)
        self._reserved.add(reservation)
        self.blocks_under_way += blocks
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Note that the blocks have moved, or will not move. May be called again."""
        if reservation in self._reserved:
            self._reserved.remove(reservation)
            self.blocks_under_way -= reservation.blocks

    def believed(self, usual_ms_per_block: float, now: float) -> float:
        """The time of a block, between that of this pair and the usual one."""
        own = self.ms_per_block
        if own is None:
            return usual_ms_per_block
        trust = exp2((self.measured_at - now) / HALF_LIFE_S)
        return usual_ms_per_block + (own - usual_ms_per_block) * trust

    def transfer_ms(self, blocks: float, usual_ms_per_block: float, now: float) -> float:
        """The time to move these blocks after those that are under way."""
        return (self.blocks_under_way + blocks) * self.believed(usual_ms_per_block, now)


_NONE: Mapping[str, Pair] = {}


class Pairs:
    """The pairs of a fleet's workers, by the ids of source and sink. `now` is the time of the
    latest decision, in seconds."""

    def __init__(self, most: int = MOST_PAIRS) -> None:
        self._most = most
        self.now = 0.0
        self._pairs: OrderedDict[tuple[str, str], Pair] = OrderedDict()
        self._of_sink: dict[str, dict[str, Pair]] = {}
        self.usual_ms_per_block: float | None = None
        """The average over all pairs; None before the first measurement."""
        self.has_windows = False
        """Whether layers with windows keep anything."""
        self.barriers = Barriers()
        self._windows: tuple[KeptWindow, ...] = ()
        self._block_bytes = 0

    def __len__(self) -> int:
        return len(self._pairs)

    def join(self, info: WorkerInfo) -> None:
        """Take a worker's registration. All workers of a fleet keep the same windows."""
        self.barriers.take(info)
        self._windows, self._block_bytes = info.windows, info.block_bytes
        self.has_windows = bool(info.windows)

    def in_windows(self, num_blocks: int) -> float:
        """The blocks of layers with windows that move with `num_blocks` blocks."""
        if not self._windows:
            return 0.0
        return sum([each.of_prefix(num_blocks) for each in self._windows])

    def room_in_windows(self, num_blocks: int) -> int:
        """The room that layers with windows take for a request of `num_blocks` blocks."""
        if not self._windows:
            return 0
        return round(sum([each.of_request(num_blocks) for each in self._windows]))

    def find(self, source: str, sink: str) -> Pair | None:
        """The pair; None if it was never noted."""
        return self._pairs.get((source, sink))

    def of_sink(self, sink: str) -> Mapping[str, Pair]:
        """The pairs with this sink of which anything is known, by source."""
        return self._of_sink.get(sink, _NONE)

    def pair(self, source: str, sink: str) -> Pair:
        """The pair, which is added if it is new."""
        key = source, sink
        found = self._pairs.get(key)
        if found is None:
            found = self._pairs[key] = Pair()
            self._of_sink.setdefault(sink, {})[source] = found
            if len(self._pairs) > self._most:
                oldest, _ = self._pairs.popitem(last=False)
                self._drop(*oldest)
        return found

    def observe_handoff(
        self, source: str, sink: str, blocks: int, num_bytes: int, took_ms: float
    ) -> None:
        """Note how long blocks of any groups took to move."""
        is_mixed = self._windows and self._block_bytes
        equal = num_bytes / self._block_bytes if is_mixed else blocks
        self.observe(source, sink, equal, took_ms)

    def observe_fetch(self, source: str, sink: str, blocks: int, took_ms: float) -> None:
        """Note how long a fetch took. It moved `blocks` blocks of the first group, and what windows
        see at the end of these."""
        self.observe(source, sink, blocks + self.in_windows(blocks), took_ms)

    def observe(self, source: str, sink: str, blocks: float, took_ms: float) -> None:
        """Note how long blocks took to move."""
        if blocks <= 0 or took_ms < 0:
            return
        ms_per_block, usual = took_ms / blocks, self.usual_ms_per_block
        pair = self.pair(source, sink)
        former = None
        if pair.ms_per_block is not None and usual is not None:
            former = pair.believed(usual, self.now)
        pair.ms_per_block, pair.measured_at = _mixed(former, ms_per_block), self.now
        self.usual_ms_per_block = _mixed(usual, ms_per_block)
        self._pairs.move_to_end((source, sink))

    def forget(self, worker_id: str) -> None:
        """Forget the pairs of a worker."""
        self.barriers.forget(worker_id)
        for key in [each for each in self._pairs if worker_id in each]:
            del self._pairs[key]
            self._drop(*key)

    def _drop(self, source: str, sink: str) -> None:
        sources = self._of_sink[sink]
        del sources[source]
        if not sources:
            del self._of_sink[sink]


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + (new - old) * WEIGHT
