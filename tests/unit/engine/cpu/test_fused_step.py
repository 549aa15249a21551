"""A whole step in one call: the choices that the sampler makes from the model's logits, bit for
bit, and the same KV; and which batches take it."""

from __future__ import annotations

import math

import pytest
import torch

from engine.attention.base import Segment, wanted_rows
from engine.cpu.fused_step import FusedStep
from engine.engine_config import EngineConfig
from engine.loader import load_engine
from engine.models.runnable import Likeliest
from engine.runner import NOT_FINITE
from engine.sampling.row_argmax import largest
from protocol.sampling import SamplingParams
from scheduling.scheduler import SchedulerConfig
from tests.sequences import sequence_of

FIRST, SECOND = list(range(60, 30, -1)), list(range(30))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def step_of(paged) -> FusedStep:
    step = paged.model.whole_step(paged.attention)
    assert step is not None
    return step


def likeliest(paged, parts, num_wanted=None) -> Likeliest:
    """As `paged.step`."""
    tokens, positions, segments = [], [], []
    for (part, first, table), count in zip(parts, num_wanted or [None] * len(parts), strict=True):
        tokens += part
        positions += range(first, first + len(part))
        segments.append(Segment(len(part), first + len(part), table, count))
    paged.attention.plan(segments)
    return step_of(paged)(tokens, positions, wanted_rows(segments))


@pytest.mark.parametrize(
    "told",
    [
        ("LlamaForCausalLM", {}),
        ("MistralForCausalLM", {"sliding_window": 24}),
        ("Qwen2ForCausalLM", {"vocab_size": 251}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "vocab_size": 130}),
        ("Gemma3ForCausalLM", {"sliding_window": 24, "sliding_window_pattern": 2}),
    ],
)
def test_the_choices_are_those_of_the_models_logits(
    make_tiny, paged_model, text, product_kernels, threads, told
):
    architecture, overrides = told
    tiny = make_tiny(architecture, dtype=torch.bfloat16, **overrides)
    tokens = [each % 130 for each in text(60)]
    batches = [
        ([(tokens[:37], 0, FIRST)], [1]),
        ([(tokens[37:38], 37, FIRST), (tokens[:50], 0, SECOND)], None),
        ([(tokens[38:39], 38, FIRST), (tokens[50:51], 50, SECOND)], [1, 1]),
        ([(tokens[39:41], 39, FIRST), (tokens[51:55], 51, SECOND)], [0, 1]),
        ([(tokens[41:44], 41, FIRST)], [0]),
    ]
    plain = paged_model(tiny.folder, kernels=product_kernels)
    expected = [largest(plain.step(*batch), product_kernels) for batch in batches]
    for count in (1, 2, 3):
        threads(count)
        paged = paged_model(tiny.folder, kernels=product_kernels)
        for batch, (values, ids) in zip(batches, expected, strict=True):
            found = likeliest(paged, *batch)
            assert list(found.logits) == values.tolist()
            assert list(found.ids) == ids.tolist()
        assert torch.equal(paged.pool.tensor.view(torch.uint8), plain.pool.tensor.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 7, 20, 40])
@pytest.mark.parametrize("where", [(), (3,), (70, 129), (128, 5)])
def test_of_equal_logits_the_first_token_and_of_nan_the_first(
    make_tiny, paged_model, text, product_kernels, rows, where
):
    """Every token is as likely as all others, but for those whose logit is NaN."""
    tiny = make_tiny("LlamaForCausalLM", dtype=torch.bfloat16, vocab_size=130)
    weights = tiny.reference.lm_head.weight.data
    weights.copy_(weights[:1].expand_as(weights))
    weights[list(where)] = torch.nan
    tiny.reference.save_pretrained(tiny.folder)
    paged = paged_model(tiny.folder, kernels=product_kernels)
    tokens = [each % 130 for each in text(rows)]
    found = likeliest(paged, [(tokens, 0, FIRST)])
    assert list(found.ids) == [min(where, default=0)] * rows
    assert [math.isnan(each) for each in found.logits] == [bool(where)] * rows
    assert found.finite_ids() == [None if where else 0] * rows


def test_a_token_that_is_none_is_an_error(make_tiny, paged_model, kernels):
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    paged = paged_model(make_tiny("LlamaForCausalLM", dtype=torch.bfloat16).folder, kernels=kernels)
    for token in (-1, paged.config.vocab_size):
        with pytest.raises(IndexError, match="vocabulary"):
            likeliest(paged, [([1, token], 0, FIRST)])


def test_other_models_and_backends_have_none(make_tiny, paged_model, kernels):
    gelu = make_tiny("LlamaForCausalLM", dtype=torch.bfloat16, hidden_act="gelu")
    wide = make_tiny("LlamaForCausalLM", dtype=torch.float32)
    for folder, given_kernels in (
        (gelu.folder, kernels),
        (wide.folder, kernels),
        (gelu.folder, None),
    ):
        paged = paged_model(folder, kernels=given_kernels)
        assert paged.model.whole_step(paged.attention) is None


class NotedStep:
    """A fused step that counts its calls."""

    def __init__(self, step: FusedStep) -> None:
        self._step = step
        self.num_calls = 0

    def __call__(self, *batch):
        self.num_calls += 1
        return self._step(*batch)


class Served:
    """An engine over a checkpoint with a clock that stands still."""

    def __init__(self, folder, takes_step: bool, **peers: int) -> None:
        scheduler = SchedulerConfig(16, chunk_min_tokens=16, chunk_max_tokens=16, itl_target_s=99)
        config = EngineConfig(folder, scheduler, "bfloat16", "cpu", num_blocks=64, **peers)
        self.engine = load_engine(config, lambda: 0.0).engine
        runner = self.engine._runner
        assert runner._step is not None
        self.step = NotedStep(runner._step)
        runner._step = self.step if takes_step else None

    def run(self, *asked: SamplingParams) -> list[list[int]]:
        """What each of these requests is answered."""
        sequences = [
            sequence_of([1 + place] * 20, params, 16, request_id=str(place))
            for place, params in enumerate(asked)
        ]
        for sequence in sequences:
            self.engine.scheduler.add(sequence)
        while self.engine.scheduler.has_work:
            self.engine.run(self.engine.plan())
        return [sequence.tokens[20:] for sequence in sequences]


def asks(**params) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "seed": 1, "temperature": 0.0, **params})


OTHERS = [
    {"temperature": 0.9},
    {"logprobs": 0},
    {"prompt_logprobs": 0},
    {"logit_bias": {5: 100.0}},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.3},
    {"allowed_token_ids": (3, 4, 5)},
    {"bad_words": ((7,), (1, 2))},
]


@pytest.fixture
def folder(make_tiny, kernels):
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    return make_tiny("LlamaForCausalLM", dtype=torch.bfloat16).folder


def test_plain_greedy_requests_take_it_and_choose_the_same(folder):
    with_step, without = Served(folder, True), Served(folder, False)
    asked = [asks(), asks(max_tokens=9), asks(seed=2)]
    assert with_step.run(*asked) == without.run(*asked)
    assert with_step.step.num_calls > 9
    assert without.step.num_calls == 0


def test_blocks_that_lie_for_other_ranks_change_no_token(folder):
    peers = {"peer_tensor_parallel": 2, "peer_pipeline_parallel": 2}
    for takes_step in (True, False):
        served = [Served(folder, takes_step, **told) for told in ({}, peers)]
        assert served[1].engine.layout.peer_stages == 2
        assert served[0].run(asks(), asks(seed=2)) == served[1].run(asks(), asks(seed=2))


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_a_batch_in_which_more_is_asked_does_not(folder, other):
    with_step, without = Served(folder, True), Served(folder, False)
    asked = [asks(), asks(**other)]
    assert with_step.run(*asked) == without.run(*asked)
    alone = Served(folder, True)
    alone.run(asks(**other))
    # Else a chunk that gives no token; and once the prompt has been told, all that follows.
    assert alone.step.num_calls == (5 if "prompt_logprobs" in other else 1)


def test_what_may_not_end_yet_is_masked(folder):
    with_step = Served(folder, True)
    [first, second, *_] = with_step.run(asks())[0]
    stop = asks(stop_token_ids=(first, second), min_tokens=3)
    told = [served.run(stop)[0] for served in (Served(folder, True), Served(folder, False))]
    assert told[0] == told[1]
    assert not {first, second} & set(told[0][:3])


def test_a_row_that_is_not_finite_fails_alone(make_tiny, kernels):
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    tiny = make_tiny("LlamaForCausalLM", dtype=torch.bfloat16)
    with torch.no_grad():
        tiny.reference.model.embed_tokens.weight[2] = torch.nan
    tiny.reference.save_pretrained(tiny.folder)
    served = Served(tiny.folder, True)
    for token in (1, 2, 3):
        sequence = sequence_of([token] * 4, asks(), 16, request_id=str(token))
        served.engine.scheduler.add(sequence)
    result = served.engine.run(served.engine.plan())
    assert served.step.num_calls == 1
    assert [(s.request_id, why) for s, why in result.failed] == [("2", NOT_FINITE)]
    assert [produced.sequence.request_id for produced in result.produced] == ["1", "3"]
