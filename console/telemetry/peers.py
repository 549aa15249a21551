"""What other routers of the fleet know: their sums, their rows, and single requests on demand.

Each router puts a summary into the store every few seconds (`process.store.router_board`); this
module makes ours and keeps theirs. A router that is gone leaves a gap: its rows vanish with its
summary, the history points that it had told stay.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from console.telemetry.sketch import Sketch
from console.telemetry.window import NUM_POINTS, Slot
from http_kit.origin import Caller

log = logging.getLogger(__name__)

TOLD_POINTS = 8


class SlotData(msgspec.Struct, frozen=True, array_like=True):
    """A slot of a window on its way between routers."""

    start_us: int
    num_ended: int
    num_counted: int
    num_good: int
    output_tokens: int
    bytes_moved: int
    ttft: dict[int, int]
    tpot: dict[int, int]
    queue: dict[int, int]

    @classmethod
    def of(cls, slot: Slot) -> SlotData:
        """The data of a slot."""
        return cls(
            slot.start_us, slot.num_ended, slot.num_counted, slot.num_good, slot.output_tokens,
            slot.bytes_moved, slot.ttft.buckets, slot.tpot.buckets, slot.queue.buckets,
        )  # fmt: skip

    def slot(self) -> Slot:
        """The slot."""
        return Slot(
            self.start_us, self.num_ended, self.num_counted, self.num_good, self.output_tokens,
            self.bytes_moved, Sketch(self.ttft), Sketch(self.tpot), Sketch(self.queue),
        )  # fmt: skip


class RouterSummary(msgspec.Struct, frozen=True):
    """One router's sums and rows; `seconds` is how long its last minute is."""

    minute: SlotData
    seconds: float
    points: list[SlotData]
    num_inflight: int
    pairs: list[dict[str, Any]]
    rows: list[dict[str, Any]]


class RequestQuestion(msgspec.Struct, frozen=True, array_like=True):
    """A question about one request: its trace, or its receipt for this caller."""

    request_id: str
    is_receipt: bool = False
    digest: bytes = b""
    is_admin: bool = False

    @property
    def caller(self) -> Caller:
        """Who wants the receipt."""
        return Caller(self.digest, self.is_admin)


class PeerRouters:
    """The last summary of every other router."""

    def __init__(self) -> None:
        self.summaries: dict[str, RouterSummary] = {}
        self._points: OrderedDict[int, Slot] = OrderedDict()
        self._told: dict[str, int] = {}  # by router: the start of its last point taken

    def take(self, bodies: Mapping[str, bytes]) -> None:
        """These are the summaries now; an undecodable one is left out."""
        self.summaries = {}
        for router_id, body in bodies.items():
            try:
                self.summaries[router_id] = msgspec.json.decode(body, type=RouterSummary)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                log.warning("router %s tells nothing that we can read: %s", router_id, error)
        for router_id, summary in self.summaries.items():
            self._take_points(router_id, summary.points)
        self._told = {each: at for each, at in self._told.items() if each in bodies}

    def points(self) -> Mapping[int, Slot]:
        """The others' history points, added up, by their start."""
        return self._points

    def rows(self) -> list[dict[str, Any]]:
        """The others' rows."""
        return [row for each in self.summaries.values() for row in each.rows]

    def _take_points(self, router_id: str, points: Sequence[SlotData]) -> None:
        for each in points:
            if each.start_us <= self._told.get(router_id, 0):
                continue
            self._told[router_id] = each.start_us
            slot = each.slot()
            known = self._points.get(each.start_us)
            self._points[each.start_us] = slot if known is None else known.plus(slot)
        while len(self._points) > NUM_POINTS:
            del self._points[min(self._points)]


def merged_pairs(lists: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Pairs as several routers saw them: rates and failures add up, the longest exposed time
    counts, and a way that one of them measured is the pair's."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for pairs in lists:
        for pair in pairs:
            key = (pair["prefill"], pair["decode"])
            found[key] = dict(pair) if key not in found else _plus(found[key], pair)
    return [found[key] for key in sorted(found)]


def _plus(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    summed = {
        name: first[name] + second[name]
        for name in ("bytes_per_s", "blocks_per_s", "writes_per_s", "failures")
    }
    largest = {
        name: max((e for e in (first[name], second[name]) if e is not None), default=None)
        for name in ("busy_bytes_per_s", "exposed_p95_ms")
    }
    path = first["path"] if first["path"] != "unknown" else second["path"]
    # a router of an earlier release does not tell
    is_below_way = any(each.get("is_below_way", False) for each in (first, second))
    return {**first, **summed, **largest, "path": path, "is_below_way": is_below_way}
