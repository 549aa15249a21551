"""The steps of workers, put together from the traces of the requests that they served."""

from __future__ import annotations

from typing import Any

import pytest

from bench.replay.player import Played
from bench.simulated_against_real.timeline import TimedStep, Timeline, Traced

MS = 1000


def request(
    worker: str,
    prompt: int,
    chunks: list[tuple[int, int, int]],
    steps: list[tuple[int, int]],
    source: str = "",
    cached: int = 0,
) -> tuple[Played, dict[str, Any]]:
    """Chunks by begin and end in ms and tokens, on `source` if there is one; decode steps by begin
    and end."""
    computed = {
        "chunks": [[start * MS, end * MS, tokens] for start, end, tokens in chunks],
        "cached_tokens": cached,
    }
    decode = {
        "worker_id": worker,
        "chunks": [],
        "cached_tokens": 0,
        "steps": [[start * MS, end * MS, 1, 1, 0] for start, end in steps],
    }
    prefill = {"worker_id": source, **computed} if source else None
    if not source:
        decode |= computed
    played = Played("s", 0, 0.0, num_prompt=prompt)
    return played, {"attempts": [{"prefill": prefill, "decode": decode}]}


def by_begin(traced: Traced) -> dict[int, TimedStep]:
    return {round(each.start * 1000): each for each in Timeline(traced).steps}


def test_requests_of_one_step_make_its_work_together() -> None:
    long = request("d1", 100, [(0, 10, 60), (12, 20, 40)], [(22, 30), (31, 40)])
    other = request("d1", 30, [(22, 30, 30)], [(31, 40)])
    found = by_begin([long, other])
    assert sorted(found) == [0, 12, 22, 31]
    work = {
        at: (each.rows, each.context, each.num_tokens, each.pairs) for at, each in found.items()
    }
    assert work == {
        0: (0, 0, 60, 60 * 61 // 2),
        12: (0, 0, 40, 60 * 40 + 40 * 41 // 2),
        22: (1, 101, 30, 30 * 31 // 2),
        31: (2, 102 + 31, 0, 0),
    }


def test_times_of_one_step_may_differ_between_traces() -> None:
    one = request("d1", 30, [(0, 10, 30)], [(11, 20), (21, 30)])
    other, trace = request("d1", 50, [(11, 20, 50)], [(21, 30)])
    for span in (
        *trace["attempts"][-1]["decode"]["chunks"],
        *trace["attempts"][-1]["decode"]["steps"],
    ):
        span[0], span[1] = span[0] - 40, span[1] - 40
    found = list(Timeline([one, (other, trace)]).steps)
    assert [(each.rows, each.num_tokens) for each in found] == [(0, 30), (1, 50), (2, 0)]


def test_a_chunk_attends_to_what_was_cached() -> None:
    (found,) = Timeline([request("d1", 100, [(0, 10, 20)], [], cached=80)]).steps
    assert found.pairs == 80 * 20 + 20 * 21 // 2


def test_a_step_lasts_until_the_next_one_if_its_worker_had_work_left() -> None:
    """A step that ends its requests lasts as long as itself and a usual turn of 2 ms."""
    one = request("d1", 9, [(0, 10, 9)], [(12, 20), (22, 30), (37, 40)])
    later = request("d1", 9, [(43, 50, 9)], [])
    found = by_begin([one, later])
    seconds = {at: each.seconds for at, each in found.items()}
    assert seconds == pytest.approx({0: 0.012, 12: 0.010, 22: 0.015, 37: 0.005, 43: 0.009})
    assert Timeline([one, later]).turn_s == pytest.approx(0.002)


def test_a_prompt_that_goes_elsewhere_leaves_no_work_behind() -> None:
    found = by_begin([request("d1", 9, [(0, 10, 9)], [(12, 20), (21, 30)], source="p1")])
    assert [found[at].goes_on for at in (0, 12, 21)] == [False, True, False]
    assert [found[at].worker for at in (0, 12, 21)] == ["p1", "d1", "d1"]


def test_workers_have_work_between_the_steps_of_a_request() -> None:
    timeline = Timeline(
        [
            request("d1", 9, [(0, 10, 9)], [(30, 40), (41, 50)]),
            request("d2", 9, [(20, 35, 9)], [(36, 60)]),
            request("d2", 9, [(70, 80, 9)], []),
        ]
    )
    assert [timeline.is_under_way("d1", at / 1000) for at in (5, 20, 40.5, 51)] == [
        True, True, True, False,
    ]  # fmt: skip
    assert [timeline.is_under_way("d2", at / 1000) for at in (10, 35.5, 65, 75)] == [
        False, True, False, True,
    ]  # fmt: skip
    assert (timeline.number(0.025), timeline.number(0.025, "d1")) == (2, 1)
    assert timeline.number(0.065) == 0
    assert not timeline.is_under_way("d3", 0.025)
