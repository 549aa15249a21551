"""Every millisecond belongs to a stage: parts add up, and missing spans show as unexplained."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.traces import (
    ChunkSpan,
    DecodeTrace,
    GapSpan,
    PrefillTrace,
    StepSpan,
    pack_steps,
)
from router.requests.shifted_traces import ClockReading, shifted
from router.requests.stages import (
    AttemptTimes,
    Part,
    RequestTimes,
    Stage,
    StageTime,
    stage_times,
)
from router.routing.placement import Mode

MS = 1000
T0 = 1_000_000_000


def prefill(**fields) -> PrefillTrace:
    known = {
        "worker_id": "p1",
        "received_us": T0 + 3 * MS,
        "scheduled_us": T0 + 13 * MS,
        "cached_tokens": 0,
        "chunks": (
            ChunkSpan(T0 + 13 * MS, T0 + 33 * MS, 512),
            ChunkSpan(T0 + 43 * MS, T0 + 63 * MS, 512),
        ),
        "waits": (GapSpan(T0 + 33 * MS, T0 + 43 * MS, "2 steps of other prompts"),),
    }
    return PrefillTrace(**(known | fields))


def decode(**fields) -> DecodeTrace:
    steps = [
        StepSpan(T0 + 75 * MS, T0 + 85 * MS, 4),
        StepSpan(T0 + 86 * MS, T0 + 96 * MS, 4, 1, 64),
        StepSpan(T0 + 116 * MS, T0 + 126 * MS, 4),
    ]
    known = {
        "worker_id": "d1",
        "received_us": T0 + 3 * MS,
        "blocks_arrived_us": T0 + 70 * MS,
        "first_step_us": T0 + 75 * MS,
        "finished_us": T0 + 126 * MS,
        "steps_since_us": T0 + 75 * MS,
        "steps": pack_steps(T0 + 75 * MS, steps),
        "stalls": (GapSpan(T0 + 96 * MS, T0 + 116 * MS, "preempted"),),
    }
    return DecodeTrace(**(known | fields))


def attempt(**fields) -> AttemptTimes:
    known = {
        "mode": Mode.REMOTE,
        "started_us": T0 + 2 * MS,
        "failed_us": 0,
        "next_us": T0 + 130 * MS,
        "workers": "p1 → d1",
        "failed": None,
        "prefill": prefill(),
        "decode": decode(),
    }
    return AttemptTimes(**(known | fields))


def times(*attempts: AttemptTimes, **fields) -> RequestTimes:
    known = {
        "received_us": T0,
        "tokenized_us": T0 + MS,
        "first_token_received_us": T0 + 64 * MS,
        "first_token_us": T0 + 65 * MS,
        "last_token_us": T0 + 128 * MS,
        "until_us": T0 + 130 * MS,
        "is_running": False,
        "num_prompt_tokens": 1024,
        "attempts": attempts,
    }
    return RequestTimes(**(known | fields))


def by_stage(rows: list[StageTime], part: Part) -> dict[str, float]:
    return {each.stage.value: each.ms for each in rows if each.part is part}


def test_the_stages_of_a_split_request() -> None:
    rows = stage_times(times(attempt()))
    assert by_stage(rows, Part.FIRST_TOKEN) == {
        "tokenize": 1, "placement": 1, "dispatch": 1, "queue": 10, "prefill": 40,
        "between_chunks": 10, "report": 1, "delivery": 1, "unexplained": 0,
    }  # fmt: skip
    assert by_stage(rows, Part.REST) == {
        "transfer": 5, "step_boundary": 5, "decode": 20, "between_steps": 1, "shared_decode": 10,
        "stall": 20, "last_token": 2, "unexplained": 0,
    }  # fmt: skip
    texts = {each.stage: each.text for each in rows}
    assert texts[Stage.BETWEEN_CHUNKS] == "2 steps of other prompts"
    assert texts[Stage.STALL] == "preempted"
    assert "64 prompt tokens" in texts[Stage.SHARED_DECODE]


def test_a_local_prefill_has_no_transfer() -> None:
    local = decode(chunks=prefill().chunks, blocks_arrived_us=0)
    rows = stage_times(times(attempt(mode=Mode.LOCAL, prefill=None, decode=local)))
    first, rest = by_stage(rows, Part.FIRST_TOKEN), by_stage(rows, Part.REST)
    assert (first["queue"], first["prefill"], first["unexplained"]) == (10, 40, 0)
    assert "transfer" not in rest
    assert rest["step_boundary"] == 10


def test_a_failed_attempt_is_a_stage_of_its_own() -> None:
    lost = attempt(
        prefill=None, decode=None, failed="p1 was lost", failed_us=T0 + 20 * MS,
        next_us=T0 + 2 * MS + 40 * MS,
    )  # fmt: skip
    later = attempt(started_us=T0 + 42 * MS, prefill=prefill(received_us=T0 + 42 * MS))
    first = by_stage(stage_times(times(lost, later)), Part.FIRST_TOKEN)
    assert first["lost_attempt"] == 40
    assert sum(first.values()) == 65


def test_an_attempt_that_broke_off_while_it_streamed() -> None:
    lost = attempt(decode=None, failed="d1", failed_us=T0 + 80 * MS, next_us=T0 + 100 * MS)
    again = attempt(started_us=T0 + 100 * MS, prefill=None, decode=None)
    rest = by_stage(stage_times(times(lost, again)), Part.REST)
    assert rest == {"decode": 15, "lost_attempt": 20, "unexplained": 28}


def test_what_no_process_reported_is_unexplained() -> None:
    rows = stage_times(times(attempt(prefill=None, decode=None)))
    first = by_stage(rows, Part.FIRST_TOKEN)
    assert first == {"tokenize": 1, "placement": 1, "delivery": 1, "unexplained": 62}


def test_a_running_request_without_a_token_waits() -> None:
    running = attempt(prefill=None, decode=None)
    unset = {"first_token_received_us": 0, "first_token_us": 0, "last_token_us": 0}
    rows = stage_times(times(running, is_running=True, **unset))
    assert by_stage(rows, Part.FIRST_TOKEN) == {
        "tokenize": 1, "placement": 1, "waiting": 128, "unexplained": 0,
    }  # fmt: skip


MARKS = st.integers(T0 - 50 * MS, T0 + 200 * MS)
SPANS = st.tuples(MARKS, MARKS)


@given(st.lists(SPANS, max_size=5), st.lists(SPANS, max_size=5), MARKS, MARKS, MARKS, st.booleans())
def test_parts_add_up_whatever_workers_report(
    chunks: list[tuple[int, int]],
    steps: list[tuple[int, int]],
    received: int,
    arrived: int,
    first_step: int,
    has_prefill: bool,
) -> None:
    parts = tuple(ChunkSpan(start, end, 16) for start, end in chunks)
    spans = [StepSpan(start, end, 1) for start, end in steps]
    local = decode(
        received_us=received, blocks_arrived_us=arrived, first_step_us=first_step,
        steps=pack_steps(T0, spans), steps_since_us=T0, chunks=() if has_prefill else parts,
    )  # fmt: skip
    remote = prefill(received_us=received, chunks=parts) if has_prefill else None
    rows = stage_times(times(attempt(prefill=remote, decode=local)))
    assert all(each.ms >= 0 for each in rows)
    assert abs(sum(by_all(rows, Part.FIRST_TOKEN)) - 65) < 1e-6
    assert abs(sum(by_all(rows, Part.REST)) - 63) < 1e-6


def by_all(rows: list[StageTime], part: Part) -> list[float]:
    return [each.ms for each in rows if each.part is part]


def test_a_trace_is_shifted_by_its_worker_s_clock() -> None:
    ahead = ClockReading(7 * MS, 100)
    moved = shifted(prefill(), ahead, T0 - 100 * MS, 0)
    assert moved.received_us == T0 - 4 * MS
    assert moved.chunks[0] == ChunkSpan(T0 + 6 * MS, T0 + 26 * MS, 512)
    assert moved.waits[0].end_us == T0 + 36 * MS


def test_a_contradiction_moves_a_trace_at_most_by_the_error() -> None:
    near = shifted(prefill(), ClockReading(0, 5 * MS), T0 + 4 * MS, T0 + 90 * MS)
    assert near.received_us == T0 + 4 * MS
    far = shifted(decode(), ClockReading(0, 2 * MS), T0, T0 + 100 * MS)
    assert far.finished_us == T0 + 124 * MS
    assert far.step_spans[0].start_us == T0 + 73 * MS
    assert far.stalls[0].start_us == T0 + 94 * MS
    torn = shifted(prefill(), ClockReading(0, 9 * MS), T0 + 4 * MS, T0 + 60 * MS)
    assert torn == prefill()
