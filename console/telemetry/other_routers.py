"""What other routers of the fleet know: their sums, their rows, and single requests on demand.

Each router puts a summary into the store every few seconds (`process.store.router_board`); this
module builds ours and keeps theirs. When a router leaves, its rows disappear with its summary;
history points received from it stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from console.telemetry.facts.router_presence import RouterPresence
from console.telemetry.quantile_sketch import MOST_BUCKET, Sketch
from console.telemetry.request_window import NUM_POINTS, Slot
from http_kit.caller import Caller
from process.clock import wall_us
from process.store.ignored_entries import DECODE_ERRORS, SUMMARY, IgnoredEntries
from protocol.field_bounds import Count

SHARED_POINTS = 8
Number = Annotated[float, Meta(ge=-1e15, le=1e15)]
Buckets = dict[Annotated[int, Meta(ge=-MOST_BUCKET, le=MOST_BUCKET)], Count]


T = TypeVar("T")


class SlotData(msgspec.Struct, frozen=True, array_like=True):
    """A slot of a window, as routers send it to each other."""

    start_us: Count
    num_ended: Count
    num_counted: Count
    num_good: Count
    output_tokens: Count
    bytes_moved: Count
    ttft: Buckets
    tpot: Buckets
    queue: Buckets

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
    """One router's sums and rows. `seconds` is the time that `minute` covers: less than 60 just
    after a start."""

    minute: SlotData
    seconds: Annotated[float, Meta(ge=1, le=1e6)]
    points: list[SlotData]
    num_inflight: Count
    pairs: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    name: str = ""


class SharedPair(msgspec.Struct, frozen=True):
    """One of the pairs of a summary; see `console.telemetry.worker_pairs`."""

    prefill: str
    decode: str
    path: str
    expected_path: str | None
    bytes_per_s: Number
    busy_bytes_per_s: Number | None
    blocks_per_s: Number
    writes_per_s: Number
    exposed_p95_ms: Number | None
    failures: Count
    is_below_way: bool = False  # like `narrowed`, missing from routers of an earlier release
    narrowed: list[str] = []


class SharedRow(msgspec.Struct, frozen=True):
    """One of the rows of a summary; see `router.requests.trace_json`."""

    request_id: str
    outcome: str
    received_us: Count
    num_attempts: Count
    prefill: str | None
    decode: str | None
    ttft_ms: Number | None
    tpot_ms: Number | None
    largest_stage: str
    stages: list[tuple[str, Number]]
    key: str | None = None


class _ReadSummary(msgspec.Struct, frozen=True):
    """A summary with undecoded rows and pairs, so that one malformed row spoils no other."""

    minute: SlotData
    seconds: Annotated[float, Meta(ge=1, le=1e6)]
    points: list[SlotData]
    num_inflight: Count
    pairs: list[msgspec.Raw]
    rows: list[msgspec.Raw]
    name: Annotated[str, Meta(max_length=512)] = ""  # missing from routers of an earlier release


class RequestQuestion(msgspec.Struct, frozen=True, array_like=True):
    """A question about one request: its trace, or its receipt for this caller."""

    request_id: str
    is_receipt: bool = False
    digest: bytes = b""
    is_admin: bool = False

    @property
    def caller(self) -> Caller:
        """The caller that wants the receipt."""
        return Caller(self.digest, self.is_admin)


class PeerRouters:
    """The last summary of every other router. Parts that cannot be decoded are left out and noted
    in `ignored`."""

    def __init__(
        self, ignored: IgnoredEntries | None = None, wall_us: Callable[[], int] = wall_us
    ) -> None:
        self.presence = RouterPresence(wall_us)
        self._ignored = ignored or IgnoredEntries()
        self.summaries: dict[str, RouterSummary] = {}
        self._points: OrderedDict[int, Slot] = OrderedDict()
        self._last_points: dict[str, int] = {}  # by router: the start of its last point taken, µs

    def take(self, bodies: Mapping[str, bytes]) -> None:
        """Replace all summaries; skip those that cannot be decoded."""
        self.summaries = {}
        self.presence.take(bodies)
        for router_id, body in bodies.items():
            read = self._decoded(_SUMMARY, router_id, body)
            if read is not None:
                self.summaries[router_id] = self._summary_of(router_id, read)
        for router_id, summary in self.summaries.items():
            self._take_points(router_id, summary.points)
            self.presence.names[router_id] = summary.name
        self._last_points = {each: at for each, at in self._last_points.items() if each in bodies}

    def points(self) -> Mapping[int, Slot]:
        """The sums of the other routers' history points, by start time."""
        return self._points

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all other routers."""
        return [row for each in self.summaries.values() for row in each.rows]

    def _summary_of(self, router_id: str, read: _ReadSummary) -> RouterSummary:
        pairs = self._all_decoded(_PAIR, f"{router_id}, pair", read.pairs)
        rows = self._all_decoded(_ROW, f"{router_id}, row", read.rows)
        return RouterSummary(
            read.minute, read.seconds, read.points, read.num_inflight,
            [msgspec.structs.asdict(each) for each in pairs],
            [msgspec.structs.asdict(each) for each in rows],
            read.name,
        )  # fmt: skip

    def _all_decoded(
        self, decoder: msgspec.json.Decoder[T], name: str, bodies: list[msgspec.Raw]
    ) -> list[T]:
        read = (self._decoded(decoder, f"{name} {i}", each) for i, each in enumerate(bodies))
        return [each for each in read if each is not None]

    def _decoded(
        self, decoder: msgspec.json.Decoder[T], name: str, body: bytes | msgspec.Raw
    ) -> T | None:
        try:
            return decoder.decode(body)
        except DECODE_ERRORS as error:
            self._ignored.note(SUMMARY, name, bytes(body), error)
            return None

    def _take_points(self, router_id: str, points: Sequence[SlotData]) -> None:
        for each in points:
            if each.start_us <= self._last_points.get(router_id, 0):
                continue
            self._last_points[router_id] = each.start_us
            slot = each.slot()
            known = self._points.get(each.start_us)
            self._points[each.start_us] = slot if known is None else known.plus(slot)
        while len(self._points) > NUM_POINTS:
            del self._points[min(self._points)]


_SUMMARY = msgspec.json.Decoder(_ReadSummary)
_PAIR = msgspec.json.Decoder(SharedPair)
_ROW = msgspec.json.Decoder(SharedRow)


def merged_pairs(lists: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge what several routers measured of the same pairs. Rates and failures are summed; the
    longest exposed time wins; the path is taken from a router that measured it."""
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
    is_below_way = any(each["is_below_way"] for each in (first, second))
    return {**first, **summed, **largest, "path": path, "is_below_way": is_below_way}
