"""One step ahead gives the tokens of one step after the other, whatever happens in between.

That nothing is written to free blocks, with peers that write to others at any time, is
`test_worker_pair`'s.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.runner import NOT_FINITE
from protocol.sampling import SamplingParams
from tests.effort import times
from tests.sequences import greedy
from tests.unit.engine.ahead_loop import VOCAB, Asked, Loop, Told

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 14),
    seed=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 0.8, 1.0]),
    top_p=st.sampled_from([1.0, 0.7]),
    top_k=st.sampled_from([0, 5]),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.sampled_from([(), (3,), (3, 7, 11, 12)]),
    logit_bias=st.sampled_from([None, {3: 2.0}]),
    allowed_token_ids=st.sampled_from([None, None, (1, 2, 3, 7, 9)]),
    logprobs=st.sampled_from([None, None, 2]),
    repetition_penalty=st.sampled_from([1.0] * 7 + [1.3]),  # cannot run ahead
)
PROMPTS = st.builds(
    lambda start, length, tail: (*((start + i) % VOCAB for i in range(length)), *tail),
    st.integers(0, 1),  # of few beginnings, so that blocks are shared
    st.integers(0, 20),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
)
REQUESTS = st.builds(
    Asked,
    prompt=PROMPTS,
    params=PARAMS,
    turn=st.integers(0, 30),
    is_remote=st.booleans(),
    priority=st.integers(0, 1),
    aborted_at=st.sampled_from([None] * 4 + [12, 20, 33]),
    deadline=st.sampled_from([1e9] * 4 + [0.15, 0.3]),
)


@settings(
    max_examples=times(50, 150),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    workload=st.lists(REQUESTS, min_size=1, max_size=9),
    num_blocks=st.integers(10, 30),
    raises_at=st.one_of(st.none(), st.integers(0, 30)),
)
def test_tokens_are_those_of_one_step_after_the_other(
    workload: list[Asked], num_blocks: int, raises_at: int | None
) -> None:
    expected = Loop(False, num_blocks).serve(workload)
    loop = Loop(True, num_blocks)
    loop.runner.raises_at = raises_at
    for name, told in loop.serve(workload).items():
        other = expected[name]
        same = min(len(told.tokens), len(other.tokens))
        assert told.tokens[:same] == other.tokens[:same]
        assert told.logprobs[:same] == other.logprobs[:same]
        if {told.end, other.end} & {"aborted", "expired"}:
            continue  # sooner or later than there
        assert (told.end, len(told.tokens)) == (other.end, len(other.tokens))


def _heard(told: dict[str, Told]) -> dict[str, tuple[list[int], str]]:
    return {name: (each.tokens, each.end) for name, each in told.items()}


def test_each_step_is_launched_before_the_one_before_is_read() -> None:
    loop = Loop(True)
    told = loop.serve([Asked((5, 6), greedy(5))])["r0"]
    assert len(told.tokens) == 5
    # A prompt's end, then decodes; the second of them with a token that nobody knows
    assert loop.runner.log == ["launch", "read", *["launch", *["launch", "read"] * 3, "read"]]
    assert loop.runner.num_promised == 3


def test_a_sequence_that_ends_by_its_length_is_not_launched_again() -> None:
    loop = Loop(True)
    loop.serve([Asked((5, 6), greedy(3))])
    assert loop.runner.log.count("launch") == 3


def test_a_token_that_ends_a_sequence_costs_it_one_row_and_its_blocks_wait_for_that() -> None:
    plain = Loop(False).serve([Asked((5, 6), greedy(9))])["r0"].tokens
    stop = plain[4]
    assert stop not in plain[:4]
    loop = Loop(True)
    loop.add("r0", Asked((5, 6), greedy(9, stop_token_ids=(stop,))))
    while not loop.told["r0"].end:
        loop.step()
    assert loop.told["r0"].tokens == plain[:5]
    assert loop.engine.is_ahead
    assert loop.scheduler.sequences == []
    assert loop.scheduler.blocks.num_pinned == 2, "the step under way writes there"
    loop.step()
    assert loop.scheduler.blocks.num_pinned == 0
    assert not loop.engine.is_ahead


def test_penalties_wait_for_each_token_and_hold_up_the_batch_only_while_they_are_there() -> None:
    workload = [
        Asked((5, 6), greedy(30)),
        Asked((7, 8), greedy(4, repetition_penalty=1.2), turn=8),
    ]
    loop = Loop(True)
    told = loop.serve(workload)
    assert told["r1"].tokens == Loop(False).serve(workload)["r1"].tokens
    assert loop.runner.log.count("alone") == 3, "its first token follows known ones"
    assert loop.runner.num_promised > 15


def test_what_a_step_that_raised_was_to_compute_is_planned_again_and_nothing_is_lost() -> None:
    expected = Loop(False).serve([Asked((5, 6), greedy(9))])["r0"].tokens
    for at in range(6):
        loop = Loop(True)
        loop.runner.raises_at = at
        assert loop.serve([Asked((5, 6), greedy(9))])["r0"].tokens == expected
        assert loop.runner.log.count("alone") == 1, "the step after the failure is by itself"


def test_a_step_under_way_is_in_nobodys_way_when_blocks_run_out() -> None:
    """A sequence due for preemption stays while the device computes it."""
    workload = [Asked((n, n + 1, n + 2), greedy(28), turn=n) for n in range(3)]
    loop = Loop(True, num_blocks=12)
    expected = Loop(False, num_blocks=12).serve(workload)
    told = loop.serve(workload)
    assert _heard(told) == _heard(expected)
    assert any(t.sequence.num_preemptions for t in told.values())


def test_a_row_that_is_not_finite_fails_alone_and_its_next_row_is_dropped() -> None:
    loop = Loop(True)
    workload = [Asked((n % VOCAB, n // VOCAB), greedy(20), turn=n) for n in range(60)]
    expected = Loop(False).serve(workload)
    told = loop.serve(workload)
    assert any(each.end == NOT_FINITE.reason for each in told.values())
    assert _heard(told) == _heard(expected)


@pytest.mark.parametrize("one_step_ahead", [False, True])
def test_the_step_model_learns_from_every_step(one_step_ahead: bool) -> None:
    loop = Loop(one_step_ahead)
    taught: list[int] = []
    loop.scheduler.model.observe = lambda cost, s: taught.append(cost.attended)  # type: ignore[method-assign]
    loop.serve([Asked((5, 6), greedy(5))])
    assert taught == [3, 3, 4, 5, 6]


def test_the_fence_behind_a_steps_blocks_stands_before_its_sampling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    class Noted:
        def __init__(self, of: object, name: str) -> None:
            self._of, self._name = of, name

        def __getattr__(self, method: str) -> Any:
            if method == self._name:
                done.append(method)
            return getattr(self._of, method)

    loop = Loop(True)
    runner = loop.runner
    runner._model = Noted(runner._model, "hidden")  # type: ignore[assignment]
    runner._sampler = Noted(runner._sampler, "choose")  # type: ignore[assignment]

    def fence(device: object) -> str:
        done.append("fence")
        return f"fence {done.count('fence')}"

    monkeypatch.setattr("engine.model_runner.fence_of", fence)
    loop.add("r0", Asked((5, 6), greedy(5)))
    chosen = runner.launch_ahead(loop.engine.plan(), None)
    assert done == ["hidden", "fence", "choose", "fence"]
    assert (chosen.stored, chosen.fence) == ("fence 1", "fence 2")


def test_other_prompts_share_the_blocks_of_a_chunk_that_is_under_way() -> None:
    """The prompts are longer than a step's chunks; the last is given all but its last block."""
    prompt = tuple(range(18))
    loop = Loop(True)
    workload = [Asked(prompt, greedy(3)), Asked(prompt, greedy(3), turn=1)]
    told = loop.serve(workload)
    assert _heard(told) == _heard(Loop(False).serve(workload))
    assert told["r1"].sequence.num_cached == 16
    assert loop.runner.log.count("launch") == 5, "three of chunks, and two of later tokens"
