"""Layers with windows keep blocks of their own, and no token changes: as transformers in fp32,
whole, in chunks of every size, from a prefix of every length, and preempted. Memory that no
sequence and no cache holds is NaN all the time."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import loader
from engine.checkpoint.config import load_model_config
from engine.engine_config import EngineConfig
from engine.loader import LoadedEngine, load_engine
from protocol.errors import ConfigError
from protocol.layout import ALL_TOKENS, WINDOW, KvLayout
from scheduling import sequence as sequences
from scheduling.block_manager import BlockManager
from scheduling.large_pages import GroupBlocks
from scheduling.scheduler import SchedulerConfig
from tests.effort import some
from tests.unit.engine.test_served_tokens import BLOCK, Served, asked, output

_LAYERS = {"use_sliding_window": True, "sliding_window": 6}
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, no layer keeps all": ("MistralForCausalLM", {"sliding_window": 9}),
    "qwen2, two blocks in a page": ("Qwen2ForCausalLM", {**_LAYERS, "max_window_layers": 1}),
    "qwen3, mixed": (
        "Qwen3ForCausalLM",
        {
            **_LAYERS,
            "num_hidden_layers": 4,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full") * 2],
        },
    ),
}


@pytest.fixture(params=WINDOWS)
def model(make_tiny: Any, request: pytest.FixtureRequest) -> Served:
    architecture, options = WINDOWS[request.param]
    return Served(make_tiny(architecture, eos_token_id=None, **options), WINDOW)


def run(loaded: LoadedEngine, *added: sequences.Sequence) -> int:
    """Run until nothing is left to do; returns how often a sequence was preempted."""
    num_preempted = 0
    for sequence in added:
        loaded.engine.scheduler.add(sequence)
    while loaded.engine.scheduler.has_work:
        batch = loaded.engine.plan()
        num_preempted += len(batch.preempted)
        poison(loaded, batch.sequences)
        loaded.engine.run(batch)
        loaded.engine.scheduler.pools.check()
    assert loaded.engine.scheduler.blocks_used == 0
    return num_preempted


def poison(loaded: LoadedEngine, running: Sequence[sequences.Sequence]) -> None:
    """Fill with NaN what is free and not cached, and what no token of a sequence has reached."""
    managers = loaded.engine.scheduler.pools.managers
    kept = [
        view.tensor[held].clone()
        for view, held in zip(loaded.pool.groups, map(held_blocks, managers), strict=True)
    ]
    loaded.pool.tensor.fill_(torch.nan)
    for view, manager, contents in zip(loaded.pool.groups, managers, kept, strict=True):
        view.tensor[held_blocks(manager)] = contents
    for sequence in running:
        for table, view in zip(sequence.tables, loaded.pool.groups, strict=True):
            fresh = -(-sequence.num_launched // BLOCK)
            view.tensor[table.blocks[max(0, fresh - table.first) :]] = torch.nan


def held_blocks(manager: BlockManager) -> list[int]:
    assert isinstance(manager, GroupBlocks)
    return [
        block
        for block in range(manager.num_blocks)
        if manager.is_pinned(block) or manager._hash_of[block] is not None
    ]


def test_whole_in_chunks_of_every_size_and_beside_others(model, text):
    prompts = [text(45), text(18)[5:], text(31)]
    for chunk in [64, *some(range(4, 24), 2)]:
        together = [asked(prompt, str(number)) for number, prompt in enumerate(prompts)]
        run(model.engine(chunk), *together)
        for prompt, sequence in zip(prompts, together, strict=True):
            model.assert_generates(prompt, output(sequence))


def test_from_a_prefix_of_every_length(model, text):
    loaded, prompt = model.engine(8), text(41)
    run(loaded, asked(prompt))
    num_cached = set()
    for length in some(range(len(prompt) + 1), 9):
        other = [*prompt[:length], *text(60)[50:57]]
        sequence = asked(other, f"after {length}")
        run(loaded, sequence)
        assert sequence.num_cached <= length
        num_cached.add(sequence.num_cached)
        model.assert_generates(other, output(sequence))
    again = asked(prompt, "again")
    run(loaded, again)
    assert again.num_cached == (len(prompt) - 1) // BLOCK * BLOCK, "the end of a prompt is kept"
    model.assert_generates(prompt, output(again))


def test_preempted(model, text):
    prompts = [text(19), text(22)[4:], text(50)[33:]]
    num_preempted = 0
    for num_blocks in range(10, 24, 2):
        together = [asked(prompt, str(number)) for number, prompt in enumerate(prompts)]
        try:
            num_preempted += run(model.engine(8, num_blocks), *together)
        except ValueError:  # a prompt does not fit
            continue
        for prompt, sequence in zip(prompts, together, strict=True):
            model.assert_generates(prompt, output(sequence))
    assert num_preempted or len(model.engine().pool.groups) == 1


def test_whole_steps_of_our_kernels_take_each_group_from_its_blocks(
    make_tiny: Any, text: Any
) -> None:
    """In bf16, where one call runs a step: the same tokens as with one group."""
    options = {**WINDOWS["qwen3, mixed"][1], "hidden_size": 64, "intermediate_size": 128}
    tiny = make_tiny("Qwen3ForCausalLM", torch.bfloat16, eos_token_id=None, **options)
    prompts = [text(45), text(18)[5:], text(31)]
    outputs = []
    for kv_windows, num_groups in ((WINDOW, 2), (ALL_TOKENS, 1)):
        config = EngineConfig(
            tiny.folder,
            SchedulerConfig(BLOCK, 8, BLOCK, 8),
            dtype="bfloat16",
            device="cpu",
            num_blocks=64,
            kv_windows=kv_windows,
        )
        loaded = load_engine(config, lambda: 0.0)
        assert loaded.engine._runner._step is not None, "a whole step in one call"
        assert len(loaded.pool.groups) == num_groups
        together = [asked(prompt, str(number)) for number, prompt in enumerate(prompts)]
        for sequence in together:
            loaded.engine.scheduler.add(sequence)
        while loaded.engine.scheduler.has_work:
            loaded.engine.run(loaded.engine.plan())
        outputs.append([output(sequence) for sequence in together])
    assert outputs[0] == outputs[1]


def layout_of(
    make_tiny: Any, kv_windows: str, kinds: str, device: str, num_ranks: int = 1
) -> KvLayout:
    """The layout of a worker whose layers attend to all tokens (f) or to windows (s)."""
    names = {"f": "full_attention", "s": "sliding_attention"}
    tiny = make_tiny(
        "Qwen3ForCausalLM",
        use_sliding_window=True,
        sliding_window=9,
        num_hidden_layers=len(kinds),
        layer_types=[names[kind] for kind in kinds],
    )
    config = EngineConfig(tiny.folder, SchedulerConfig(BLOCK, 8, BLOCK, 8), kv_windows=kv_windows)
    backend: Any = SimpleNamespace(
        rounds_weights=False,
        kv_dtype="float32",
        numerics="",
        orders=lambda layout: ("tokens",),
        device=torch.device(device),
        shard=SimpleNamespace(rank=0, size=num_ranks, stage=0, num_stages=1),
    )
    return loader._layout(config, load_model_config(tiny.folder), backend, "model")


def test_cards_refuse_it(make_tiny: Any) -> None:
    with pytest.raises(ConfigError, match="kv_windows window is for workers on a CPU"):
        layout_of(make_tiny, WINDOW, "fs", "cuda")
    assert not layout_of(make_tiny, "auto", "fs", "cuda").grouping


def test_ranks_have_the_groups_of_one(make_tiny: Any) -> None:
    layout = layout_of(make_tiny, "auto", "fs", "cpu", 2)
    assert (layout.tp_size, [each.window for each in layout.groups]) == (2, [None, 9])


def test_auto_makes_groups_of_windows_if_other_layers_keep_all_tokens(make_tiny: Any) -> None:
    def windows(kv_windows: str, kinds: str) -> list[int | None]:
        groups = layout_of(make_tiny, kv_windows, kinds, "cpu").groups
        return [each.window for each in groups]

    assert windows("auto", "sfs") == windows(WINDOW, "sfs") == [None, 9]
    assert windows("auto", "ff") == windows(ALL_TOKENS, "sfs") == [None]
    assert (windows("auto", "ss"), windows(WINDOW, "ss")) == ([None], [9])
