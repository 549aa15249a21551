"""Steps of a trace: packed, unpacked, thinned."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.traces import GAP_US, DecodeTrace, StepSpan, pack_steps, thinned, unpack_steps

SINCE = 1_700_000_000_000_000
Parts = list[tuple[int, int, int, int]]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 200_000), st.integers(0, 10**6), st.integers(1, 512), st.integers(0, 8192)
    ),
    max_size=40,
)


def laid_out(parts: Parts) -> list[StepSpan]:
    spans, end = [], SINCE
    for gap, duration, batch, tokens in parts:
        start = end + gap
        end = start + duration
        spans.append(StepSpan(start, end, batch, 1, tokens))
    return spans


def num_gaps(spans: list[StepSpan]) -> int:
    return sum(b.start_us - a.end_us > GAP_US for a, b in itertools.pairwise(spans))


@given(STEPS)
def test_packed_steps_come_back(parts: Parts) -> None:
    spans = laid_out(parts)
    assert unpack_steps(SINCE, pack_steps(SINCE, spans)) == spans


@given(STEPS, st.integers(1, 10))
def test_thinned_steps_keep_every_step_and_every_gap(parts: Parts, limit: int) -> None:
    spans = laid_out(parts)
    thin = list(thinned(spans, limit))
    assert sum(each.num_steps for each in thin) == len(spans)
    assert sum(each.chunk_tokens for each in thin) == sum(each.chunk_tokens for each in spans)
    assert num_gaps(thin) == num_gaps(spans)
    assert len(thin) <= limit + num_gaps(spans) + 1


def test_steps_that_overlap_move_behind_each_other() -> None:
    spans = [StepSpan(SINCE, SINCE + 10, 1), StepSpan(SINCE + 5, SINCE + 20, 1)]
    assert unpack_steps(SINCE, pack_steps(SINCE, spans))[1] == StepSpan(SINCE + 10, SINCE + 20, 1)


def test_malformed_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes"):
        _ = DecodeTrace(worker_id="d", received_us=1, steps=b"123").step_spans
