"""Models whose layers keep different tokens: their memory, transfers and prefixes in a simulated
fleet are those of the engine's own layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.checkpoint.config import load_model_config
from protocol.layout import KvLayout, first_covering, kept_grouping
from protocol.messages import Role
from scheduling.batch import Batch, Chunk
from simulator.commands.fleets import Devices, Size
from simulator.commands.settings import PlanSettings, SimulateSettings
from simulator.devices.cards import CARDS
from simulator.devices.model_shape import model_shape
from simulator.devices.roofline import Roofline
from simulator.devices.step_times import ChunkWork, chunk_work
from simulator.event_queue import Action
from simulator.fleet import Fleet, FleetSpec
from simulator.network import Network
from simulator.policies.names import POLICIES
from tests.effort import some
from tests.layouts import windowed_layout
from tests.sequences import greedy, sequence_of
from tests.unit.simulator.fleets import BLOCK, served, single, worker_spec

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "attention_bias": True, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "eos_token_id": 200002, "rope_theta": 150000, "hidden_act": "silu",
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024, "model_type": "gemma3_text",
        },
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
        "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
        "topk_group": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "eos_token_id": 1,
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 2048, "head_dim": 256,
        "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "eos_token_id": 151645,
        "shared_expert_intermediate_size": 512, "linear_num_value_heads": 32,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    },
}  # fmt: skip
WINDOW = 9
LAYOUT = windowed_layout(BLOCK, WINDOW)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    return tmp_path


@pytest.mark.parametrize("kv_windows", ["auto", "all", "window"])
@pytest.mark.parametrize("folder", CONFIGS, indirect=True)
def test_a_models_blocks_have_the_bytes_of_its_engines_layout(
    folder: Path, kv_windows: str
) -> None:
    ours = model_shape(str(folder)).kv_layout(64, 2.0, kv_windows)
    config = load_model_config(folder)
    grouping = kept_grouping(config.kv_grouping(), kv_windows)
    theirs = msgspec.structs.replace(config.kv_layout("m", 64, "bfloat16"), grouping=grouping)
    assert ours.grouping == theirs.grouping
    assert (ours.block_bytes, ours.page_bytes) == (theirs.block_bytes, theirs.page_bytes)
    for group in range(len(theirs.groups)):
        assert ours.of_group(group).block_bytes == theirs.of_group(group).block_bytes
        assert ours.blocks_per_page(group) == theirs.blocks_per_page(group)


def fleet_of(layout: KvLayout | None, prefill: int, num_blocks: int = 64) -> Fleet:
    pools = tuple(
        (replace(worker_spec(role, num_blocks), layout=layout, block_bytes=1000.0), count)
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, 1))
        if count
    )
    return Fleet(FleetSpec(pools, POLICIES["always-split"], link_bytes_per_s=1e9), seed=7)


@pytest.mark.parametrize("num_prompt", some(range(1, 40), 5))
def test_a_handoff_moves_the_bytes_of_the_layout(
    num_prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a block's 3 layers, two keep windows."""
    flows: list[float] = []
    send = Network.send

    def noting(network: Network, source: int, sink: int, num_bytes: float, done: Action) -> None:
        flows.append(num_bytes)
        send(network, source, sink, num_bytes, done)

    monkeypatch.setattr(Network, "send", noting)
    fleet = fleet_of(LAYOUT, prefill=1)
    outcome = served(fleet, single(0.0, num_prompt, 5))
    (request,) = outcome.requests
    end = -(-num_prompt // BLOCK)
    windowed = end - first_covering(num_prompt // BLOCK, BLOCK, WINDOW)
    assert request.prefill is not None
    assert request.sent_blocks == end + windowed
    assert request.sent_bytes == pytest.approx((end + 2 * windowed) * 1000 / 3)
    assert sum(flows) == pytest.approx(request.sent_bytes)
    for worker in outcome.workers:
        worker.scheduler.pools.check()
        assert worker.scheduler.blocks_used == 0


def test_a_prompt_goes_on_where_all_groups_can() -> None:
    """Behind a prompt its windows lie at its last two block boundaries."""
    outcome = served(
        fleet_of(LAYOUT, prefill=0),
        single(0.0, 82, 3, ((1, 20),)),
        single(9.0, 82, 3, ((1, 20),)),
        single(19.0, 82, 3, ((1, 19), (90, 1))),
    )
    assert [each.cached_tokens for each in outcome.requests] == [0, 80, 76]


def test_a_pool_holds_more_requests_with_windows() -> None:
    """Each of 200 tokens: 50 blocks with all layers, 64 of which fit into memory."""
    sessions = [single(0.0, 200, 40) for _ in range(6)]
    at_once = []
    for layout in (None, LAYOUT):
        outcome = served(fleet_of(layout, prefill=0), *sessions)
        at_once.append(outcome.duration_s)
    assert at_once[1] < at_once[0]


@pytest.mark.parametrize("folder", ["gpt-oss-20b", "qwen3-next"], indirect=True)
@pytest.mark.parametrize("kind", [SimulateSettings, PlanSettings])
def test_fleets_have_the_groups_of_their_model(folder: Path, kind: Any) -> None:
    given = {"trace": "poisson:", "model": str(folder), "gpu": "H200"}
    if kind is PlanSettings:
        given["gpus"] = 8  # type: ignore[assignment]
    spec = Devices(kind(**given)).fleet(Size(1, 1), POLICIES["baton"])
    worker, _ = spec.pools[0]
    assert worker.layout is not None
    config = load_model_config(folder)
    assert worker.layout.grouping == config.kv_grouping()
    pools = worker.pools()
    memory = worker.num_blocks * worker.block_bytes
    assert pools.num_pages == memory // worker.layout.page_bytes
    outcome = Fleet(spec, seed=1)
    (request,) = served(outcome, single(0.0, 3000, 4)).requests
    blocks = -(-3000 // 64)
    expected = float(blocks * worker.bytes_by_group[0])
    for group, rule in enumerate(pools.rules[1:], start=1):
        expected += (blocks - rule.covers_from(3000 // 64)) * worker.bytes_by_group[group]
    assert request.sent_bytes == expected


@pytest.mark.parametrize("folder", ["gpt-oss-20b"], indirect=True)
def test_layers_with_windows_attend_to_these_only(folder: Path) -> None:
    shape, card = model_shape(str(folder)), CARDS["H100"]
    assert (shape.full_layers, shape.windows) == (12, ((128, 12),))
    every = replace(shape, groups=())
    ours, full = Roofline(card, shape, 1), Roofline(card, every, 1)
    (fixed, slope), (all_fixed, all_slope) = ours.decode_line(4), full.decode_line(4)
    assert slope == pytest.approx(all_slope / 2)
    assert fixed - all_fixed == pytest.approx(4 * 128 * slope)
    chunks = _chunks((0, 100), (1000, 400))
    assert chunk_work(chunks, [128]).within == ((5050 + 400 * 128, 100 + 127 + 400),)
    assert ours.seconds(4, 9000, ChunkWork()) == pytest.approx(fixed + 9000 * slope)
    long = _chunks((60_000, 4000))
    times = [each.seconds(0, 0, chunk_work(long, [128])) for each in (ours, full)]
    products = ours.seconds(0, 0, ChunkWork(4000))
    assert times[0] - products == pytest.approx((times[1] - products) / 2, rel=0.01)


def _chunks(*spans: tuple[int, int]) -> Batch:
    chunks = [
        Chunk(sequence_of((1,), greedy(2), 16, request_id=str(start)), start, number, False)
        for start, number in spans
    ]
    return Batch(chunks=chunks)
