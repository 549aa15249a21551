"""Observations of fleets drawn at random: workers in any condition and load, what each key got,
requests that were judged, pairs, and what surrounds the fleet."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st

from console.doctor.facts import KeyFacts, LogFacts, LoopFacts
from console.doctor.observation import (
    Observation,
    PairFacts,
    RequestFacts,
    StepModelFacts,
    WorkerFacts,
)
from protocol.messages import Role
from tests.unit.console.doctor.staged_facts import (
    NOW_US,
    ROUTERS,
    SINCE_US,
    STARVED,
    STORE,
    gone,
    seen,
    worker,
)

SLOW_STEP = StepModelFacts(fixed_us=60_000, per_token_us=100, per_attended_us=0.02)
STEP = StepModelFacts(fixed_us=12_000, per_token_us=100, per_attended_us=0.02)
CAUSES = ("lost", "silent", "other_model", "other_secret", "address")


@st.composite
def standings(draw: st.DrawFn, name: str) -> Any:
    """A worker's standing."""
    kind = draw(st.sampled_from(("usable",) * 6 + ("draining", "starting") + CAUSES))
    if kind in CAUSES:
        return msgspec.structs.replace(gone(name, kind), is_replaced=draw(st.booleans()))
    since_us = draw(st.sampled_from((SINCE_US, NOW_US - 45 * 60_000_000)))
    places = draw(st.sampled_from((None, 4, 16)))
    return worker(
        name,
        condition=kind,
        since_us=0 if kind == "usable" else since_us,
        max_batch_size=places,
        num_running=draw(st.integers(0, places or 9)),
        num_waiting=draw(st.sampled_from((0, 1, 36))),
        blocks_total=draw(st.sampled_from((40, 300, 800))),
        prefill_unreachable=draw(st.booleans()),
    )


@st.composite
def keys(draw: st.DrawFn, name: str) -> KeyFacts:
    """What one key got."""
    ended = draw(st.sampled_from((0, 4, 60)))
    late = draw(st.sampled_from((0, 0, 2, 20)))
    return KeyFacts(
        name=name,
        accepted=ended,
        ended=ended,
        good=round(ended * draw(st.sampled_from((0, 0.9, 1)))),
        limited=draw(st.sampled_from((0, 0, 30, 900))),
        refused=draw(st.sampled_from((0, 0, 5, 400))),
        invalid=draw(st.sampled_from((0, 0, 90))),
        waiting=late + draw(st.integers(0, 3)),
        late=late,
    )


@st.composite
def requests(draw: st.DrawFn) -> tuple[RequestFacts, ...]:
    """Finished requests of one kind, and good ones beside them."""
    ttft_ms, tpot_ms = draw(st.sampled_from((80.0, 4000.0))), draw(st.sampled_from((9.0, 90.0)))
    stage = draw(st.sampled_from(("queue", "prefill", "between_chunks", "transfer")))
    steps = draw(st.sampled_from((0, 40)))
    long = draw(st.sampled_from((0, 4))) if steps else 0
    slow_late = draw(st.booleans())
    kind = RequestFacts(
        received_us=SINCE_US,
        outcome=draw(st.sampled_from(("finished",) * 3 + ("failed",))),
        num_attempts=draw(st.sampled_from((1, 1, 2))),
        prefill=draw(st.sampled_from(("prefill-1", None))),
        decode="decode-1",
        num_prompt_tokens=400,
        num_output_tokens=200,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        first={stage: ttft_ms},
        rest={"decode": 200 * tpot_ms},
        num_steps=steps,
        num_long_steps=long,
        num_long_shared_steps=draw(st.sampled_from((0, long))),
        long_step_ms=draw(st.sampled_from((8.0, 80.0))) if long else None,
        early_step_ms=9.0 if slow_late else tpot_ms,
        late_step_ms=tpot_ms,
        expected_cached_tokens=draw(st.sampled_from((0, 200))),
    )
    good = RequestFacts(
        received_us=SINCE_US,
        prefill="prefill-1",
        decode="decode-1",
        num_prompt_tokens=400,
        num_output_tokens=20,
        ttft_ms=80.0,
        tpot_ms=9.0,
        first={"prefill": 80.0},
        rest={"decode": 180.0},
    )
    number = draw(st.sampled_from((0, 12, 40, 150)))
    return (kind,) * number + (good,) * draw(st.sampled_from((0, 90)))


@st.composite
def measured(draw: st.DrawFn, name: str) -> WorkerFacts:
    """A worker over the window."""
    places = draw(st.sampled_from((4, 64)))
    return WorkerFacts(
        worker_id=name,
        role=Role(name.partition("-")[0]),
        max_batch_size=places,
        blocks_total=800,
        num_waiting=draw(st.sampled_from((0.0, 2.5))),
        num_running=draw(st.integers(1, places)),
        blocks_used=draw(st.sampled_from((80.0, 600.0, 780.0))),
        num_steps=500,
        step_tokens=8.0,
        step_ms=draw(st.sampled_from((9.0, 14.0, 70.0))),
        step_attended=3000.0,
        step_model=draw(st.sampled_from((STEP, SLOW_STEP, None))),
        hit_rate=draw(st.sampled_from((None, 0.1, 0.8))),
        prompt_tokens=20_000,
        evictions_per_s=draw(st.sampled_from((0.0, 20.0))),
        losses=draw(st.sampled_from((0, 0, 3))),
        preemptions=draw(st.sampled_from((0, 5))),
        joined_us=draw(st.sampled_from((0, SINCE_US))),
    )


@st.composite
def pairs(draw: st.DrawFn) -> PairFacts:
    """A pair that moved blocks."""
    path = draw(st.sampled_from(("CMA", "CMA", "TCP", None)))
    return PairFacts(
        prefill="prefill-1",
        decode=draw(st.sampled_from(("decode-1", "decode-2"))),
        path=path,
        expected_path="CMA",
        bytes_moved=1 << 27,
        busy_bytes_per_s=draw(st.sampled_from((1e7, 1e9))),
        is_below_way=draw(st.booleans()),
        exposed_p95_ms=draw(st.sampled_from((0.0, 40.0))),
        narrowed=draw(st.sampled_from(((), ("decode-2",)))),
    )


NAMES = ("prefill-1", "prefill-2", "decode-1", "decode-2", "decode-3")


class Staged(NamedTuple):
    """An observation whose `repr` does not repeat its requests."""

    seen: Observation

    def __repr__(self) -> str:
        kinds = Counter(msgspec.json.encode(each).decode() for each in self.seen.requests)
        return f"{msgspec.structs.replace(self.seen, requests=())!r} with {dict(kinds)}"


@st.composite
def fleets(draw: st.DrawFn) -> Staged:
    """An observation of a fleet, which may be in several troubles at once."""
    present = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    standing = tuple(draw(standings(each)) for each in sorted(present))
    pressures = st.sampled_from((None, 0.3, 0.93, 4.0))
    prefill, decode = draw(pressures), draw(pressures)
    short = [
        role
        for role, pressure in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        if (pressure or 0.0) > 1 and draw(st.booleans())
    ]
    observation = seen(
        *standing,
        keys=tuple(draw(keys(each)) for each in draw(st.sampled_from(((), ("",), ("a", "b"))))),
        store=draw(st.sampled_from((None, None, STORE))),
        routers=draw(st.sampled_from(((), (), ROUTERS))),
        hosts=draw(st.sampled_from(((), (), (STARVED,)))),
        loop=draw(st.sampled_from((None, LoopFacts(lag_ms=41.0, worst_ms=90.0)))),
        logs=draw(st.sampled_from(((), (LogFacts(process="router", lost=3, since_us=SINCE_US),)))),
        workers=tuple(draw(measured(e.worker_id)) for e in standing if e.is_usable),
        requests=draw(requests()),
        pairs=tuple(draw(st.lists(pairs(), max_size=2))),
        pressure_prefill=prefill,
        pressure_decode=decode,
        short=tuple(short),
        settings=draw(st.sampled_from(({}, {"kv_dtype": "fp8", "weights": "int4"}))),
    )
    return Staged(observation)
