"""An engine sharded over ranks gives the tokens of a whole one, and holds its KV in slices."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.base import Segment
from engine.checkpoint.config import load_model_config
from engine.checkpoint.shard import Shard
from engine.kv_pool import KvPool
from engine.loader import LoadedEngine, load_engine
from engine.parallel.ranks import Ranks, Step
from engine.parallel.sums import NoSums, RankLost
from protocol.errors import ConfigError
from protocol.layout import WINDOW
from scheduling.states.step import StateStep
from tests.effort import in_turn, some
from tests.gguf_hybrids import (
    DELTA_FAMILIES,
    INTERVAL,
    NEMOTRON_FAMILIES,
    Converted,
    write_delta,
    write_nemotron,
)
from tests.hybrid_models import HYBRIDS
from tests.latent_models import LATENT_MODELS
from tests.rank_group import RankGroup
from tests.unit.engine.parallel.sharded_engine import (
    DEADLINE_S,
    GROUPS,
    MAX_TOKENS,
    Job,
    engine_config,
    generate,
    rank_main,
)

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("Qwen2ForCausalLM", {}),
    ("Qwen3ForCausalLM", {}),
    ("Qwen2MoeForCausalLM", EXPERTS),
]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    group = RankGroup(rank_main, tmp_path_factory.mktemp("ranks") / "store", 4)
    yield group
    group.end(DEADLINE_S)


@pytest.mark.parametrize(("kind", "ranks"), in_turn(KINDS, GROUPS))
def test_tokens_and_kv_equal_those_of_one_rank(
    group: RankGroup,
    make_tiny: Any,
    text: Any,
    kind: tuple[str, dict[str, Any]],
    ranks: tuple[int, int],
) -> None:
    (architecture, config), (size, num_stages) = kind, ranks
    tiny = make_tiny(architecture, **SIZES, **config)
    words = text(45)
    prompts = (tuple(words[:21]), tuple(words[21:40]), tuple(words[40:]))
    whole = load_engine(engine_config(tiny.folder), lambda: 0.0)
    expected = generate(whole.engine, prompts)
    assert [len(tokens) for tokens in expected] == [MAX_TOKENS] * 3

    answers = group.do(Job(tiny.folder, size, prompts, num_stages), DEADLINE_S)

    assert answers[0][2] == expected
    assert whole.pool.tensor.any()
    for layout, pool, _ in answers[:size]:
        layers, heads = layout.layers, layout.heads
        assert (len(heads), layout.num_stages) == (4 * num_stages // size, num_stages)
        own = whole.pool.tensor[:, layers.start : layers.stop, :, heads.start : heads.stop]
        torch.testing.assert_close(torch.from_numpy(pool), own, rtol=0.0, atol=1e-4)


WINDOWED = ["GptOssForCausalLM", "Gemma3ForCausalLM"]


@pytest.mark.parametrize(
    ("architecture", "attention", "ranks"),
    some(
        [
            (architecture, attention, ranks)
            for ranks in [(2, 1), (4, 2), (2, 2), (3, 3)]
            for attention in ["torch", "auto"]
            for architecture in WINDOWED
        ],
        4,
    ),
)
def test_layers_with_windows_keep_blocks_of_their_own_on_every_rank(
    group: RankGroup, make_tiny: Any, text: Any, architecture: str, attention: str, ranks: Any
) -> None:
    """Also where a stage has no layer of a group: layers 0 and 2 of the three have windows."""
    size, num_stages = ranks
    tiny = make_tiny(architecture, **SIZES, intermediate_size=64)
    prompts = (tuple(text(41)), tuple(text(60)[41:]))
    expected = generate(load_engine(engine_config(tiny.folder), lambda: 0.0).engine, prompts)
    job = Job(tiny.folder, size, prompts, num_stages, attention, kv_windows=WINDOW)
    answers = group.do(job, DEADLINE_S)
    assert answers[0][2] == expected
    layouts = [layout for layout, *_ in answers[:size]]
    assert {len(layout.groups) for layout in layouts} == {2}
    assert {pool.shape[0] for _, pool, _ in answers[:size]} == {len(answers[0][1])}
    assert all(pool.any() for _, pool, _ in answers[:size])


def test_more_ranks_than_heads_have_copies_of_them(
    group: RankGroup, make_tiny: Any, text: Any
) -> None:
    tiny = make_tiny("Qwen2ForCausalLM", **SIZES | {"num_key_value_heads": 2})
    prompts = (tuple(text(30)),)
    expected = generate(load_engine(engine_config(tiny.folder), lambda: 0.0).engine, prompts)
    answers = group.do(Job(tiny.folder, 4, prompts), DEADLINE_S)
    assert answers[0][2] == expected
    first, copy, second, last = (pool for _, pool, _ in answers)
    assert first.shape[3] == 1
    assert (first == copy).all()
    assert (second == last).all()
    assert not (first == second).all()


@pytest.mark.parametrize(("kind", "ranks"), in_turn(some(HYBRIDS, 3), [(2, 1), (4, 2), (2, 2)]))
def test_ranks_split_the_states_of_hybrids(
    group: RankGroup, make_tiny: Any, text: Any, kind: str, ranks: tuple[int, int]
) -> None:
    """Also where a stage has no layer with keys and values."""
    (architecture, config), (size, num_stages) = HYBRIDS[kind], ranks
    experts = EXPERTS if "num_experts" in config else {}
    if "n_routed_experts" in config:
        experts = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48}
    tiny = make_tiny(architecture, **SIZES | config | experts)
    words = text(45)
    prompts = (tuple(words[:21]), tuple(words[21:40]), tuple(words[40:]))
    num_blocks = 1000
    whole = load_engine(engine_config(tiny.folder, num_blocks=num_blocks), lambda: 0.0)
    expected = generate(whole.engine, prompts)
    job = Job(tiny.folder, size, prompts, num_stages, num_blocks=num_blocks)
    answers = group.do(job, DEADLINE_S)
    assert answers[0][2] == expected
    assert_hold_parts(answers[:size], num_blocks, whole)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a test whose GGUF files are not for anybody's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "ranks"),
    in_turn(some([*DELTA_FAMILIES, *NEMOTRON_FAMILIES], 3), [(2, 1), (4, 2), (2, 2)]),
)
def test_ranks_split_gguf_files_of_hybrids(
    group: RankGroup,
    make_tiny: Any,
    text: Any,
    own_cache: Path,
    name: str,
    ranks: tuple[int, int],
) -> None:
    """Plain ones have the tokens of the checkpoint in safetensors, quantized ones of one rank."""
    architecture, config = HYBRIDS[(DELTA_FAMILIES | NEMOTRON_FAMILIES)[name]]
    if name in DELTA_FAMILIES:
        config = config | INTERVAL | (EXPERTS if "num_experts" in config else {})
    elif "n_routed_experts" in config:
        config = config | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64}
    widths = {"hidden_size": 64, "intermediate_size": 64, "mamba_head_dim": 32}
    widths |= {"linear_value_head_dim": 32}  # rows are blocks of Q8_0
    tiny = make_tiny(architecture, **SIZES | config | widths)
    prompts = (tuple(text(21)), tuple(text(40)[21:]))

    def tokens_of(folder: Path) -> Any:
        config = engine_config(folder, num_blocks=4000)
        return generate(load_engine(config, lambda: 0.0).engine, prompts)

    plain = tokens_of(tiny.folder)
    size, num_stages = ranks
    for kind in ("F32", "Q8_0"):
        folder = write_hybrid(own_cache / f"{kind}.gguf", tiny, name, kind)
        job = Job(folder, size, prompts, num_stages, num_blocks=4000)
        answers = group.do(job, DEADLINE_S)
        assert answers[0][2] == (plain if kind == "F32" else tokens_of(folder))


def write_hybrid(file: Path, tiny: Any, name: str, kind: str) -> Path:
    if name in NEMOTRON_FAMILIES:
        return write_nemotron(file, tiny.folder, name, kind)
    tiny.reference.save_pretrained(tiny.folder, save_original_format=False)
    return write_delta(file, Converted(tiny.folder, name, splits=True), name, kind)


def assert_hold_parts(answers: Any, num_blocks: int, whole: LoadedEngine) -> None:
    for layout, numbers, _ in answers:
        pool = KvPool(layout, num_blocks)
        pool.tensor.copy_(torch.from_numpy(numbers))
        assert pool.tensor.any()
        assert_holds_part(pool, whole)


def assert_holds_part(part: KvPool, whole: LoadedEngine) -> None:
    """A rank has its part of all blocks and states that the engine of one rank keeps."""
    pools = whole.engine.scheduler.pools
    assert pools._pages is not None
    for ours, theirs, owner in zip(part.groups, whole.pool.groups, pools.managers, strict=True):
        pages = [page for page, each in enumerate(pools._pages._owner) if each is owner]
        assert pages
        layers, heads = ours.layout.layers, ours.layout.heads
        own = theirs.tensor[:, layers.start : layers.stop, :, heads.start : heads.stop]
        by_page = (each.reshape(part.num_pages, -1)[pages] for each in (ours.tensor, own))
        torch.testing.assert_close(*by_page, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("qwen3.5", "linear_num_key_heads 2 cannot be split over 4 ranks"),
        ("nemotron-h", "n_groups 2 cannot be split over 4 ranks"),
    ],
)
def test_states_that_cannot_be_split_are_refused(make_tiny: Any, kind: str, refused: str) -> None:
    architecture, options = HYBRIDS[kind]
    config = load_model_config(make_tiny(architecture, **SIZES | options).folder)
    with pytest.raises(ConfigError, match=refused):
        config.sharded(4)


@pytest.mark.parametrize(("attention", "ranks"), [("torch", (2, 1)), ("auto", (4, 2))])
def test_ranks_split_the_heads_of_latent_attention_and_copy_its_latents(
    group: RankGroup, make_tiny: Any, text: Any, attention: str, ranks: tuple[int, int]
) -> None:
    (architecture, config), (size, num_stages) = LATENT_MODELS["deepseek v3 biases"], ranks
    tiny = make_tiny(architecture, **config | {"num_attention_heads": 8, "num_key_value_heads": 8})
    prompts = (tuple(text(21)), tuple(text(40)[21:]))
    whole = load_engine(engine_config(tiny.folder), lambda: 0.0)
    expected = generate(whole.engine, prompts)
    answers = group.do(Job(tiny.folder, size, prompts, num_stages, attention), DEADLINE_S)
    assert answers[0][2] == expected
    for layout, pool, _ in answers[:size]:
        assert layout.block_shape[1:] == (1, 1, 4, config["kv_lora_rank"] + 8)
        own = whole.pool.tensor[:, layout.layers.start : layout.layers.stop]
        torch.testing.assert_close(torch.from_numpy(pool), own, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_our_own_kernels_give_the_same_tokens(
    group: RankGroup, make_tiny: Any, text: Any, num_stages: int
) -> None:
    tiny = make_tiny("LlamaForCausalLM", **SIZES)
    prompts = (tuple(text(30)),)
    expected = generate(load_engine(engine_config(tiny.folder), lambda: 0.0).engine, prompts)
    answers = group.do(Job(tiny.folder, 2, prompts, num_stages, attention="auto"), DEADLINE_S)
    assert answers[0][2] == expected


def test_sizes_that_cannot_be_split_are_refused(make_tiny: Any) -> None:
    config = load_model_config(make_tiny("LlamaForCausalLM", **SIZES).folder)
    with pytest.raises(ConfigError, match="num_attention_heads 8 cannot be split over 3"):
        config.sharded(3)
    with pytest.raises(ConfigError, match="num_key_value_heads 4 cannot be split over 6"):
        replace(config, num_heads=12).sharded(6)
    with pytest.raises(ConfigError, match=r"num_hidden_layers \d+ cannot be split over 64 stages"):
        config.staged(0, 64)


def test_a_stage_has_its_layers_part_of_all_that_differs_between_layers(make_tiny: Any) -> None:
    whole = load_model_config(make_tiny("Qwen2MoeForCausalLM", **SIZES, **EXPERTS).folder)
    whole = replace(
        whole, num_layers=5, layer_kinds=tuple("abcde"), sliding_windows=(1, 2, 3, 4, 5)
    )
    stages = [whole.staged(stage, 2) for stage in range(2)]
    assert [(each.num_layers, each.first_layer) for each in stages] == [(3, 0), (2, 3)]
    assert [(each.embeds, each.gives_logits) for each in stages] == [(True, False), (False, True)]
    for field in fields(whole):
        value = getattr(whole, field.name)
        if isinstance(value, tuple) and len(value) == whole.num_layers:
            parts = [getattr(each, field.name) for each in stages]
            assert parts == [value[:3], value[3:]], field.name


@pytest.mark.parametrize("key", ["moe_intermediate_size", "shared_expert_intermediate_size"])
def test_experts_that_cannot_be_split_are_refused(make_tiny: Any, key: str) -> None:
    options = {**SIZES, **EXPERTS, key: 33}
    config = load_model_config(make_tiny("Qwen2MoeForCausalLM", **options).folder)
    with pytest.raises(ConfigError, match="expert's intermediate size 33 cannot be split over 2"):
        config.sharded(2)


segments = st.builds(
    lambda query_len, before, table, wanted, first, others, states: Segment(
        query_len, before + query_len, table, min(wanted, query_len), first, tuple(others), states
    ),
    st.integers(1, 5),
    st.integers(0, 50),
    st.lists(st.integers(0, 2**40), max_size=4),
    st.integers(0, 5),
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 2**40), max_size=3)), max_size=2),
    st.none()
    | st.builds(
        StateStep,
        st.integers(0, 50),
        st.none() | st.integers(0, 9),
        st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=2).map(
            tuple
        ),
    ),
)


@given(st.lists(segments, max_size=4), st.data())
def test_a_step_reads_as_it_was_written(parts: list[Segment], data: st.DataObject) -> None:
    num_tokens = sum(part.query_len for part in parts)
    tokens = data.draw(st.lists(st.integers(0, 99), min_size=num_tokens, max_size=num_tokens))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        announced = Step.of(parts, tokens)
        Ranks(Shard(0, 2), [ours], NoSums()).announce(announced)
        step = Ranks(Shard(1, 2), [theirs], NoSums()).next_message()
    assert step == announced
    planned = [msgspec.structs.astuple(each) for each in step.planned()]
    assert planned == [msgspec.structs.astuple(each) for each in parts]
    assert step.tokens == tokens
    assert len(step.positions) == num_tokens


def test_a_rank_that_stands_still_while_it_loads_is_named() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    (first, answers), (second, _) = pairs
    second.settimeout(0.01)
    answers.send(bytes(8))
    with pytest.raises(RankLost, match=r"rank 2 has not loaded within 0\.01 s"):
        Ranks(Shard(0, 3), [first, second], NoSums()).least(3)
    for each in (end for pair in pairs for end in pair):
        each.close()


def test_a_lost_rank_is_an_error_and_no_tokens(group: RankGroup, make_tiny: Any, text: Any) -> None:
    """The last test of this group, which is one rank short afterwards."""
    tiny = make_tiny("LlamaForCausalLM", **SIZES)
    job = Job(tiny.folder, 2, (tuple(text(9)),), loses_rank=True)
    _, error, tokens = group.do(job, DEADLINE_S, dying=(1,))[0]
    assert tokens is None
    assert "rank" in error
