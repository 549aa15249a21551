"""Hybrids keep states in slots of the pool, and no token changes: as transformers in fp32, whole,
in chunks of every size, from a prefix of every length, forked, preempted, computed again, split and
handed over. Memory that no sequence and no cache holds is NaN all the time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine import loader
from engine.checkpoint.config import load_model_config
from engine.engine_config import EngineConfig
from engine.loader import LoadedEngine, choose_backend
from protocol.errors import ConfigError
from scheduling import block_pools
from scheduling.scheduler import SchedulerConfig
from scheduling.sequence import SequenceState
from tests.effort import some
from tests.hybrid_models import HYBRIDS
from tests.sequences import greedy, sequence_of
from tests.unit.engine.test_served_tokens import BLOCK, MAX_TOKENS, Served, asked, output
from tests.unit.engine.test_window_tokens import poison, run
from worker.moved_blocks import moved_blocks


class Hybrid(Served):
    """Counts its pool in pages, each of which holds one state."""

    def engine(self, chunk: int = 64, num_pages: int = 40) -> LoadedEngine:
        model = load_model_config(self._tiny.folder)
        in_a_page = model.kv_layout("", BLOCK, "float32").blocks_per_page(0)
        loaded = super().engine(chunk, num_pages * in_a_page)
        assert loaded.pool.num_pages == num_pages
        return loaded


@pytest.fixture(params=some(["qwen3-next", "qwen3.5", "nemotron-h", "nemotron-h moe"], 1))
def model(make_tiny: Any, request: pytest.FixtureRequest) -> Hybrid:
    architecture, options = HYBRIDS[request.param]
    return Hybrid(make_tiny(architecture, eos_token_id=None, **options))


def test_whole_in_chunks_and_beside_others(model: Hybrid, text: Any) -> None:
    prompts = [text(45), text(18)[5:], text(31), text(2)[1:]]
    for chunk in [64, *some(range(4, 24), 2)]:
        together = [asked(prompt, str(number)) for number, prompt in enumerate(prompts)]
        run(model.engine(chunk), *together)
        for prompt, sequence in zip(prompts, together, strict=True):
            model.assert_generates(prompt, output(sequence))


@pytest.mark.parametrize("share", [8, 0.25])
def test_from_a_prefix_of_every_length(
    model: Hybrid, text: Any, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Also with states at boundaries within the prompt, which come every few blocks. The pool has
    room for all prompts, so that none of these states is evicted."""
    monkeypatch.setattr(block_pools, "CHECKPOINT_SHARE", share)
    loaded, prompt = model.engine(16, num_pages=400), text(41)
    every = loaded.engine.scheduler.pools.checkpoint_blocks
    run(loaded, asked(prompt))
    again = asked(prompt, "again")
    run(loaded, again)
    assert again.num_cached == (len(prompt) - 1) // BLOCK * BLOCK, "the end of a prompt is kept"
    model.assert_generates(prompt, output(again))
    for length in some(range(len(prompt) + 1), 9):
        other = [*prompt[:length], *text(60)[50:57]]
        sequence = asked(other, f"after {length}")
        run(loaded, sequence)
        assert length // BLOCK // every * every * BLOCK <= sequence.num_cached <= length
        model.assert_generates(other, output(sequence))


def test_where_prompts_fork_a_state_is_kept(model: Hybrid, text: Any) -> None:
    """The second prompt with a common beginning finds no state there, the third one does."""
    loaded, common = model.engine(), text(30)
    found = []
    for number in range(3):
        prompt = [*common, *text(80)[40 + 7 * number : 47 + 7 * number]]
        sequence = asked(prompt, str(number))
        run(loaded, sequence)
        found.append(sequence.num_cached)
        model.assert_generates(prompt, output(sequence))
    assert found == [0, 0, 28]


def test_a_turn_goes_on_behind_the_answer(model: Hybrid, text: Any) -> None:
    """Decoding keeps the state at the last boundary that it has crossed."""
    loaded, first = model.engine(), asked(text(21))
    run(loaded, first)
    known = first.tokens[:-1]
    turn = asked([*first.tokens, *text(60)[50:55]], "next")
    run(loaded, turn)
    assert turn.num_cached == len(known) // BLOCK * BLOCK
    model.assert_generates(turn.tokens[: turn.num_prompt], output(turn))


def test_preempted(model: Hybrid, text: Any) -> None:
    """Of those that decode, one is preempted again and again, and goes on from what is cached."""
    prompts = [text(19), text(22)[4:], text(50)[33:]]
    together = [asked(prompt, str(number)) for number, prompt in enumerate(prompts)]
    loaded = model.engine(8)
    scheduler = loaded.engine.scheduler
    for sequence in together:
        scheduler.add(sequence)
    for _ in range(20):
        batch = loaded.engine.plan()
        poison(loaded, batch.sequences)
        loaded.engine.run(batch)
        if together[0] in batch.decodes and together[0].state is SequenceState.RUNNING:
            scheduler._preempt(together[0])
    assert together[0].num_preemptions > 1
    run(loaded)
    for prompt, sequence in zip(prompts, together, strict=True):
        model.assert_generates(prompt, output(sequence))


def test_a_step_that_is_computed_again_changes_nothing(model: Hybrid, text: Any) -> None:
    """As after a step that failed, or whose grammar's mask was late."""
    loaded, sequence = model.engine(16), asked(text(37))
    scheduler, runner = loaded.engine.scheduler, loaded.engine._runner
    scheduler.add(sequence)
    while scheduler.has_work:
        batch = loaded.engine.plan()
        poison(loaded, batch.sequences)
        runner.launch(batch)
        loaded.engine.run(loaded.engine.plan() if batch.decodes else batch)
    model.assert_generates(text(37), output(sequence))


def test_no_step_runs_ahead(model: Hybrid, text: Any, caplog: pytest.LogCaptureFixture) -> None:
    """`one_step_ahead` may be on for a CPU, too."""
    loaded, sequence = model.engine(16), asked(text(37))
    loaded.engine.run_ahead(1)
    assert "no step runs ahead" in caplog.text
    run(loaded, sequence)
    model.assert_generates(text(37), output(sequence))


def test_what_ends_early_leaves_nothing(model: Hybrid, text: Any) -> None:
    loaded = model.engine(16)
    scheduler = loaded.engine.scheduler
    for num_steps in (1, 2, 3, 4):
        sequence = asked(text(37), str(num_steps))
        scheduler.add(sequence)
        for _ in range(num_steps):
            loaded.engine.run(loaded.engine.plan())
        scheduler.finish(sequence)
        scheduler.pools.check()
        assert scheduler.blocks_used == 0


@pytest.mark.parametrize("num_prompt", [37, 36, 3])
@pytest.mark.parametrize("num_generated", [1, 4])
def test_split_and_handed_over(
    model: Hybrid, text: Any, num_prompt: int, num_generated: int
) -> None:
    """After the first token, as between prefill and decode; after some, as when a worker drains.
    The state at the end moves, and the one at the last boundary before."""
    first, second, prompt = model.engine(16), model.engine(16), text(num_prompt)
    source = asked(prompt)
    first.engine.scheduler.add(source)
    while len(source.tokens) < len(prompt) + num_generated:
        first.engine.run(first.engine.plan())
    known = list(source.tokens)
    params = greedy(MAX_TOKENS - num_generated + 1)
    target = sequence_of(known[:-1], params, BLOCK, remote=True, source_has_begun=True)
    second.engine.scheduler.add(target)
    assert second.engine.plan().received == [target]
    second.pool.tensor.fill_(torch.nan)
    num_tokens = len(known) - 1
    for group, (theirs, ours) in enumerate(zip(first.pool.groups, second.pool.groups, strict=True)):
        wanted = moved_blocks(target, group, num_tokens)
        moved = moved_blocks(source, group, num_tokens, wanted.first_block)
        assert moved.first_block == wanted.first_block
        ours.tensor[wanted.block_ids] = theirs.tensor[moved.block_ids]
    assert len(wanted.block_ids) == (1 if num_tokens % BLOCK == 0 or num_tokens < BLOCK else 2)
    second.engine.scheduler.arrived(target, known[-1], 0.0)
    run(second)
    model.assert_generates(prompt, target.tokens[len(prompt) :])


@pytest.mark.parametrize(
    "changes",
    [{"device": "cuda"}, {"batch_invariant": True}],
    ids=["card", "batch_invariant"],
)
def test_what_does_not_serve_states_is_refused(
    make_tiny: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    architecture, options = HYBRIDS["qwen3.5"]
    tiny = make_tiny(architecture, **options)
    device = changes.get("device", "cpu")
    monkeypatch.setattr(loader, "pick_device", lambda _: torch.device(device))
    config = EngineConfig(
        tiny.folder,
        SchedulerConfig(BLOCK, 8, BLOCK, 8),
        device=device,
        batch_invariant=changes.get("batch_invariant", False),
    )
    with pytest.raises(ConfigError, match=r"layers of this model keep states|states of this model"):
        choose_backend(config, load_model_config(tiny.folder), None)
