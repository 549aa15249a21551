"""From the demo model's folder to an engine: pool size, limits, device, and a warm first step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.model_source import resolve_model
from engine import loader
from engine.attention.flashinfer_attention import FlashInferUnavailable
from engine.checkpoint.config import load_model_config
from engine.checkpoint.shard import Shard
from engine.cpu.backend import CpuBackend, cpu_backend
from engine.device import pick_device
from engine.engine_config import EngineConfig
from engine.gpu import choice
from engine.gpu.backend import CardBackend
from engine.gpu.choice import card_backend
from engine.loader import load_engine
from engine.parallel.backend import RankBackend
from engine.parallel.ranks import Ranks
from engine.parallel.sums import NoSums
from protocol.errors import ConfigError, ModelLoadError
from protocol.layout import PAIRS, SPLIT, TOKENS, KvLayout
from scheduling.scheduler import SchedulerConfig
from tests.gguf_files import write_gguf
from tests.paths import DEMO_MODEL

SCHEDULER = SchedulerConfig(block_size=16, max_batch_size=2, chunk_max_tokens=32)


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(**{"folder": DEMO_MODEL, "scheduler": SCHEDULER, "device": "cpu", **fields})


def test_blocks_that_are_asked_for_bound_the_context() -> None:
    loaded = load_engine(config(num_blocks=3, dtype="float32"), lambda: 0.0)
    assert loaded.pool.num_blocks == loaded.engine.scheduler.blocks.num_blocks == 3
    assert loaded.engine.limits.max_context == 48
    assert loaded.pool.tensor.dtype == torch.float32
    loaded.engine.warm_up()
    assert loaded.engine.scheduler.blocks.num_pinned == 0


@pytest.mark.parametrize("fraction", [None, 0.5])
def test_without_a_number_the_pool_holds_a_full_batch_at_full_context(
    fraction: float | None,
) -> None:
    loaded = load_engine(config(max_context=160, memory_fraction=fraction), lambda: 0.0)
    assert loaded.pool.num_blocks == 2 * 10
    assert loaded.engine.limits.max_context == 160


def test_a_context_beyond_the_models_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_context 5000 .* 4096"):
        load_engine(config(max_context=5000), lambda: 0.0)


def test_the_pool_lives_in_memory_that_the_transport_gives() -> None:
    buffers: list[bytearray] = []

    def allocate(num_bytes: int) -> memoryview:
        buffers.append(bytearray(num_bytes))
        return memoryview(buffers[0])

    loaded = load_engine(config(num_blocks=2), lambda: 0.0, allocate)
    assert len(buffers[0]) == 2 * loaded.pool.block_bytes
    loaded.pool.tensor.fill_(1)
    assert any(buffers[0])


def test_devices_that_are_not_there_are_a_wrong_setting() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    if torch.cuda.is_available():
        assert pick_device("auto").type == "cuda"
    else:
        assert pick_device("auto").type == "cpu"
        with pytest.raises(ConfigError, match="cuda"):
            pick_device("cuda:0")


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_engine(config(folder=tmp_path), lambda: 0.0)


@pytest.mark.parametrize("fields", [{"dtype": "float32"}, {"attention": "torch"}])
def test_integers_are_refused_where_no_kernel_multiplies_them(fields: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="weights int4 needs dtype bfloat16 and our own kernels"):
        load_engine(config(weights="int4", **{"dtype": "bfloat16", **fields}), lambda: 0.0)


def test_workers_of_other_weights_have_other_blocks(kernels: ctypes.CDLL) -> None:
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    layouts = {
        load_engine(
            config(weights=weights, num_blocks=2, dtype="bfloat16"), lambda: 0.0
        ).engine.layout.fingerprint
        for weights in ("auto", "int8", "int4")
    }
    assert len(layouts) == 3


def test_blocks_of_a_file_compute_other_keys_than_their_rounded_values(
    kernels: ctypes.CDLL, make_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    sizes = {"hidden_size": 96, "intermediate_size": 64}
    write_gguf(tmp_path / "tiny.gguf", make_tiny(**sizes).folder, "llama", kind="Q8_0")
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        folder = resolve_model(tmp_path / "tiny.gguf")
    fields = {"folder": folder, "num_blocks": 2, "dtype": "bfloat16"}
    auto, exact = (
        load_engine(config(weights=weights, **fields), lambda: 0.0).engine
        for weights in ("auto", "exact16")
    )
    assert auto.layout.fingerprint != exact.layout.fingerprint


def test_the_same_weights_in_fewer_bits_hand_over_to_each_other(kernels: ctypes.CDLL) -> None:
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    prefill, decode = (
        load_engine(config(weights=weights, num_blocks=2, dtype="bfloat16"), lambda: 0.0)
        for weights in ("exact16", "exact12")
    )
    assert decode.engine.layout == prefill.engine.layout


@pytest.mark.parametrize(
    ("fields", "order"),
    [
        ({}, PAIRS),
        ({"kv_dtype": "fp8"}, PAIRS),
        ({"kv_order": "tokens"}, TOKENS),
        ({"kv_order": "pairs"}, PAIRS),
        ({"kv_order": "pairs", "scheduler": SchedulerConfig(block_size=8)}, TOKENS),
        ({"attention": "torch"}, TOKENS),
        ({"dtype": "float32"}, TOKENS),
        ({"scheduler": SchedulerConfig(block_size=8)}, TOKENS),
    ],
)
def test_blocks_lie_as_the_kernels_read_them(
    kernels: ctypes.CDLL, fields: dict[str, Any], order: str
) -> None:
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    loaded = load_engine(config(num_blocks=2, **{"dtype": "bfloat16", **fields}), lambda: 0.0)
    assert loaded.engine.layout.order == order


class SplitOrders(CpuBackend):
    def orders(self, layout: KvLayout) -> Sequence[str]:
        return SPLIT, PAIRS, TOKENS


@pytest.mark.parametrize(
    ("wanted", "is_sharded", "order"),
    [
        ("auto", False, SPLIT),
        ("auto", True, PAIRS),
        ("pairs", False, PAIRS),
        ("split", True, TOKENS),
        ("tokens", False, TOKENS),
    ],
)
def test_ranks_share_blocks_that_have_shards(wanted: str, is_sharded: bool, order: str) -> None:
    model = load_model_config(DEMO_MODEL)
    whole = SplitOrders(model, "bfloat16")
    ranks = Ranks(Shard(0, 2), [], NoSums())
    backend = RankBackend(whole, ranks, model) if is_sharded else whole
    layout = model.kv_layout("m", 16, "bfloat16")
    assert loader.order_of(wanted, backend.orders(layout)) == order


@pytest.mark.parametrize(
    ("peers", "order", "peer_stages"),
    [
        ({}, SPLIT, 0),
        ({"peer_tensor_parallel": 1, "peer_pipeline_parallel": 2}, SPLIT, 0),
        ({"peer_tensor_parallel": 2}, PAIRS, 1),
        ({"peer_tensor_parallel": 2, "peer_pipeline_parallel": 3}, PAIRS, 3),
    ],
)
def test_blocks_lie_for_peers_that_divide_heads_in_another_way(
    peers: dict[str, int], order: str, peer_stages: int
) -> None:
    model = load_model_config(DEMO_MODEL)
    layout = loader._layout(config(**peers), model, SplitOrders(model, "bfloat16"), "m")
    assert (layout.order, layout.peer_stages) == (order, peer_stages)


@pytest.mark.parametrize(
    ("weights", "dtype", "attention", "bits"),
    [
        ("auto", "bfloat16", "auto", 12),
        ("auto", "bfloat16", "torch", 16),
        ("auto", "float32", "auto", 16),
        ("exact16", "bfloat16", "auto", 16),
    ],
)
def test_bf16_weights_take_twelve_bits_where_our_kernels_multiply(
    kernels: ctypes.CDLL,
    weights: str,
    dtype: str,
    attention: str,
    bits: int,
) -> None:
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    settings = config(weights=weights, dtype=dtype, attention=attention)
    model = load_model_config(DEMO_MODEL)
    assert cpu_backend(settings, model, torch.device("cpu"), dtype).weight_bits == bits


@pytest.mark.parametrize("reason", ["its kernels cannot be built: no nvcc", "it cannot be loaded"])
def test_a_card_without_flashinfers_kernels_computes_attention_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    def unavailable(*args: Any, **kwargs: Any) -> None:
        raise FlashInferUnavailable(reason)

    monkeypatch.setattr(choice, "FlashInferBackend", unavailable)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    arguments = (load_model_config(DEMO_MODEL), torch.device("cuda"), "bfloat16")
    assert type(card_backend(config(device="cuda"), *arguments)) is CardBackend
    assert f"attention by torch, much slower than FlashInfer: {reason}" in caplog.text
    for field in ({"attention": "kernel"}, {"kv_dtype": "fp8"}):
        with pytest.raises(ConfigError, match=f"but {reason}"):
            card_backend(config(device="cuda", **field), *arguments)
