"""A step is planned, run and committed; what fails in it fails alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from engine.attention.base import Segment
from engine.engine import Engine, EngineLimits
from engine.fences import PASSED, Fence
from engine.model_runner import ModelRunner
from engine.runner import NOT_FINITE, NOTHING_LEFT, RowFailure, SampledToken
from engine.sampling.grammar import Grammars
from engine.sampling.sampler import Sampler
from protocol.errors import GRAMMAR_FAILED, GenerationFailed
from protocol.sampling import SamplingParams
from scheduling.batch import Batch
from scheduling.block_manager import BlockManager
from scheduling.scheduler import Scheduler, SchedulerConfig
from scheduling.sequence import Sequence, SequenceState
from scheduling.step_model import StepModel
from tests.layouts import bare_layout
from tests.paths import DEMO_MODEL
from tests.sequences import sequence_of
from tests.unit.held_grammar import HeldGrammar

BLOCK, VOCAB = 4, 20
DEMO_TOKENIZER = DEMO_MODEL / "tokenizer.json"
NO_GRAMMARS = Grammars(Path("no-such-file"), VOCAB, ())


class SlowFence:
    """A card that is done only when somebody has waited for it; the clock goes on then."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self.has_passed = False
        self._advance = advance

    def is_done(self) -> bool:
        return self.has_passed

    def wait(self) -> None:
        if not self.has_passed:
            self.has_passed = True
            self._advance()


class ScriptedRunner:
    """Gives every sequence token 9, but those in `broken` a `failure`; tells the clock to go on."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self.broken: set[str] = set()
        self.failure = NOT_FINITE
        self.is_card = False
        self.launched: list[SlowFence] = []
        self._advance = advance

    def launch(self, batch: Batch) -> tuple[torch.Tensor, Fence]:
        if not self.is_card:
            self._advance()
            return torch.empty(0), PASSED
        self.launched.append(SlowFence(self._advance))
        return torch.empty(0), self.launched[-1]

    def sample(self, batch: Batch, logits: torch.Tensor) -> list[SampledToken | RowFailure]:
        return [
            self.failure
            if sequence.request_id in self.broken
            else SampledToken(9, -0.5, ((9, -0.5),))
            for sequence in batch.sampled
        ]


def run(runner: ModelRunner, batch: Batch) -> list[SampledToken | RowFailure]:
    """A batch's tokens."""
    logits, _ = runner.launch(batch)
    return runner.sample(batch, logits)


class Rig:
    """An engine on a clock on which every step takes 0.25 s."""

    def __init__(self, num_blocks: int = 16, max_context: int = 64) -> None:
        self.now = 0.0
        self.runner = ScriptedRunner(self.advance)
        config = SchedulerConfig(BLOCK, chunk_min_tokens=BLOCK, chunk_max_tokens=8, itl_target_s=99)
        self.scheduler = Scheduler(config, BlockManager(num_blocks), StepModel())
        layout = bare_layout(BLOCK)
        limits = EngineLimits(VOCAB, max_context)
        self.engine = Engine(self.scheduler, self.runner, layout, limits, lambda: self.now)  # type: ignore[arg-type]

    def advance(self) -> None:
        self.now += 0.25

    def add(self, name: str, first: int, length: int, logprobs: int | None = None) -> Sequence:
        params = SamplingParams(max_tokens=3, seed=0, logprobs=logprobs)
        sequence = sequence_of([first] * length, params, BLOCK, request_id=name)
        self.scheduler.add(sequence)
        return sequence


def test_a_step_commits_tokens_with_its_times_and_teaches_the_step_model() -> None:
    rig = Rig()
    sequence = rig.add("a", 1, 5, logprobs=1)
    before = rig.scheduler.model.coefficients
    result = rig.engine.run(rig.engine.plan())
    assert (result.started, result.ended) == (0.0, 0.25)
    assert [(p.index, p.token_id) for p in result.produced] == [(0, 9)]
    assert result.logprobs[0] is not None
    assert result.logprobs[0].logprob == -0.5
    assert sequence.tokens[5:] == [9]
    assert rig.scheduler.model.coefficients != before


def observed(rig: Rig) -> list[tuple[int, float]]:
    """What the step model is going to be taught: tokens and seconds."""
    taught: list[tuple[int, float]] = []
    rig.scheduler.model.observe = lambda cost, s: taught.append((cost.num_tokens, s))  # type: ignore[method-assign]
    return taught


def test_no_step_outlives_its_run_unless_it_may_run_ahead() -> None:
    rig = Rig()
    rig.runner.is_card = True
    taught = observed(rig)
    rig.add("a", 1, 18)
    result = rig.engine.run(rig.engine.plan())
    assert rig.runner.launched[0].has_passed
    assert rig.engine.computed.is_done()
    assert (result.ended, taught) == (0.25, [(8, 0.25)])


def test_an_empty_step_costs_and_teaches_nothing() -> None:
    rig = Rig()
    before = rig.scheduler.model.coefficients
    result = rig.engine.run(rig.engine.plan())
    assert (result.produced, rig.now) == ([], 0.0)
    assert rig.scheduler.model.coefficients == before


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_row_without_finite_logits_is_not_committed_and_not_cached(when: str) -> None:
    rig = Rig()
    sick, healthy = rig.add("sick", 1, 5), rig.add("healthy", 2, 5)
    rig.engine.run(rig.engine.plan())  # the first block of both, and all of the first prompt
    rig.engine.run(rig.engine.plan())
    rig.runner.broken = {"sick"}
    if when == "prefill":
        rig.scheduler.finish(sick)
        rig.scheduler.blocks.clear_cache()
        sick = rig.add("sick", 3, 5)
    num_tokens, num_computed = sick.num_tokens, sick.num_computed
    result = rig.engine.run(rig.engine.plan())
    assert result.failed == [(sick, NOT_FINITE)]
    assert [p.sequence for p in result.produced] == [healthy]
    assert len(result.logprobs) == 1
    assert result.batch.sequences == [healthy]
    assert (sick.num_tokens, sick.num_computed) == (num_tokens, num_computed)
    assert sick.state is not SequenceState.FINISHED, "its owner ends it"
    rig.scheduler.finish(sick)
    assert not set(sick.hashes) & set(rig.scheduler.blocks.hashes())
    rig.scheduler.blocks.check()


def test_a_row_that_its_own_parameters_leave_nothing_takes_no_block_from_others() -> None:
    rig = Rig()
    shared = rig.add("first", 1, 9)
    rig.engine.run(rig.engine.plan())
    rig.engine.run(rig.engine.plan())
    picky = rig.add("picky", 1, 9)
    rig.runner.broken, rig.runner.failure = {"picky"}, NOTHING_LEFT
    while not rig.engine.run(rig.engine.plan()).failed:
        assert picky.num_output == 0
    rig.scheduler.finish(picky)
    assert set(shared.hashes) <= set(rig.scheduler.blocks.hashes())


@pytest.mark.parametrize(("num_blocks", "max_context"), [(16, 64), (1, 2), (1, 64), (16, 1)])
def test_warming_up_leaves_no_trace_however_small_the_pool(
    num_blocks: int, max_context: int
) -> None:
    rig = Rig(num_blocks, max_context)
    rig.engine.warm_up()
    blocks = rig.scheduler.blocks
    assert (blocks.num_pinned, blocks.num_cached, blocks.num_cached_free) == (0, 0, 0)
    assert not rig.scheduler.has_work
    delta = blocks.drain_events()
    assert (delta.stored, delta.removed) == ([], [])


def test_weights_that_give_no_finite_logits_stop_the_start() -> None:
    rig = Rig()
    rig.runner.broken = {"warm-up"}
    with pytest.raises(GenerationFailed, match="not finite"):
        rig.engine.warm_up()


class ScriptedModel:
    """Hidden states that are the wanted tokens, and logits that name the one after each; NaN for
    13."""

    device = torch.device("cpu")
    config = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: object,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        self.calls.append((tokens.tolist(), positions.tolist()))
        return tokens if rows is None else tokens[rows]

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.one_hot((last + 1) % VOCAB, VOCAB).float() * 10
        logits[last == 13] = torch.nan
        return logits


class NotedAttention:
    """Remembers what was planned."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def plan(self, segments: list[Segment]) -> None:
        self.segments = segments


def test_the_runner_lays_out_decodes_before_chunks_and_samples_the_others_of_a_bad_row() -> None:
    model, attention = ScriptedModel(), NotedAttention()
    runner = ModelRunner(model, attention, Sampler(VOCAB), NO_GRAMMARS)  # type: ignore[arg-type]
    rig = Rig()
    running = rig.add("running", 1, 3)
    rig.engine.run(rig.engine.plan())
    rig.add("sick", 13, 3)
    rig.add("healthy", 5, 2)
    rig.add("long", 6, 10)
    batch = rig.engine.plan()
    rows = run(runner, batch)
    tokens, positions = model.calls[0]
    assert tokens[0] == 9, "the decode comes first"
    assert positions[0] == running.num_computed == 3
    sizes = [1] + [chunk.num_tokens for chunk in batch.chunks]
    assert [segment.query_len for segment in attention.segments] == sizes
    completes = [1] + [int(chunk.completes) for chunk in batch.chunks]
    assert [segment.num_wanted for segment in attention.segments] == completes
    expected = {"running": 10, "sick": NOT_FINITE, "healthy": 6}
    names = [sequence.request_id for sequence in batch.sampled]
    assert (
        dict(zip(names, [getattr(row, "token_id", row) for row in rows], strict=True)) == expected
    )


def test_the_runner_records_the_prompts_of_which_it_is_wanted_chunk_by_chunk() -> None:
    attention = NotedAttention()
    runner = ModelRunner(ScriptedModel(), attention, Sampler(VOCAB), NO_GRAMMARS)  # type: ignore[arg-type]
    rig = Rig()
    running = rig.add("running", 1, 3)
    rig.engine.run(rig.engine.plan())
    plain, scored = rig.add("plain", 2, 3), rig.add("scored", 5, 11)
    scored.tokens[6] = 6  # the one that the model expects behind 5
    scored.sampling = msgspec.structs.replace(scored.sampling, prompt_logprobs=1)
    while scored.num_output == 0:
        batch = rig.engine.plan()
        run(runner, batch)
        of_chunks = attention.segments[len(batch.decodes) :]
        for chunk, segment in zip(batch.chunks, of_chunks, strict=True):
            expected = chunk.num_tokens if chunk.sequence is scored else int(chunk.completes)
            assert segment.num_wanted == expected
        rig.scheduler.commit(batch, [9] * len(batch.sampled), rig.now)
    told = scored.take_prompt_logprobs()
    assert told is not None
    entries = told.entries()
    assert [each.rank for each in entries] == [*[2] * 5, 1, 2, 2, 2, 2]
    assert [each.top[0][0] for each in entries] == [*[6] * 6, 7, 6, 6, 6]
    assert scored.take_prompt_logprobs() is None
    assert running.take_prompt_logprobs() is plain.take_prompt_logprobs() is None


def test_a_step_that_also_makes_a_prompts_logits_teaches_nothing() -> None:
    rig = Rig()
    scored = rig.add("scored", 1, 5)
    scored.sampling = msgspec.structs.replace(scored.sampling, prompt_logprobs=1)
    before = rig.scheduler.model.coefficients
    rig.engine.run(rig.engine.plan())
    assert scored.num_output == 1
    assert rig.scheduler.model.coefficients == before


def test_a_grammar_masks_its_row_and_fails_alone_with_a_reason() -> None:
    grammars = Grammars(DEMO_TOKENIZER, VOCAB, ())
    runner = ModelRunner(ScriptedModel(), NotedAttention(), Sampler(VOCAB), grammars)  # type: ignore[arg-type]
    rig = Rig()
    free, bound, broken = (rig.add(name, 6, 2) for name in ("free", "bound", "broken"))
    matchers = [grammars.matcher(grammar, []) for grammar in ('start: ")"', "nothing")]
    bound.grammar, broken.grammar = matchers
    for matcher in matchers:
        matcher.wait()
    batch = rig.engine.plan()
    assert batch.sampled == [free, bound, broken]
    rows = dict(zip([s.request_id for s in batch.sampled], run(runner, batch), strict=True))
    assert getattr(rows["free"], "token_id", None) == 7
    assert getattr(rows["bound"], "token_id", None) == 8, "the only token allowed: )"
    failure = rows["broken"]
    assert isinstance(failure, RowFailure)
    assert "its grammar failed" in failure.reason
    assert failure.code == GRAMMAR_FAILED


def test_a_grammar_that_is_being_compiled_holds_up_nobody() -> None:
    rig = Rig()
    slow, quick = rig.add("slow", 1, 3), rig.add("quick", 2, 3)
    slow.grammar = grammar = HeldGrammar(is_ready=False)
    assert rig.engine.plan().sequences == [quick]
    grammar.is_ready = True
    assert slow in rig.engine.plan().sequences


def test_a_step_that_samples_nothing_gives_no_tokens() -> None:
    runner = ModelRunner(ScriptedModel(), NotedAttention(), Sampler(VOCAB), NO_GRAMMARS)  # type: ignore[arg-type]
    rig = Rig()
    rig.add("long", 6, 30)
    assert run(runner, rig.engine.plan()) == []
