"""Products in fp8 beside torch's scaled product and bf16; pools of fp8; where it is refused."""

from __future__ import annotations

import ctypes

import pytest
import torch

from engine.attention.flashinfer_attention import plan_arguments
from engine.attention.pool_layers import PoolLayers
from engine.checkpoint.config import load_model_config
from engine.engine_config import EngineConfig
from engine.gpu import choice
from engine.gpu.backend import CardBackend
from engine.gpu.fp8_format import FP8, FP8_LIMIT
from engine.gpu.fp8_linear import Fp8Linear, scaled_rows, why_not_fp8
from engine.kv_pool import KvPool
from engine.loader import load_engine
from protocol.errors import ConfigError
from scheduling.scheduler import SchedulerConfig
from tests.paths import DEMO_MODEL


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_rows_are_scaled_to_the_largest_value_there_is() -> None:
    x = random(5, 48) * torch.tensor([[1e-4], [1.0], [300.0], [0.0], [1e4]])
    values, scales = scaled_rows(x)
    assert values.dtype == FP8
    assert scales.shape == (5, 1)
    assert values.float().abs().amax(dim=1).tolist() == [FP8_LIMIT] * 3 + [0.0, FP8_LIMIT]
    back = values.float() * scales
    # 3 bits of mantissa round by 1/16 at most; below 2^-6 steps are 2^-9
    bound = (x.float().abs() / 16).maximum(scales * 2**-10)
    assert (back - x.float()).abs().le(bound * 1.001).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_spoils_itself_alone(bad: float) -> None:
    x = random(3, 32)
    x[1, 7] = bad
    y = Fp8Linear(random(16, 32, seed=1))(x)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_product_is_that_of_torchs_scaled_product(with_bias: bool) -> None:
    weight, x = random(64, 128), random(9, 128, seed=1)
    bias = random(64, seed=2) if with_bias else None
    layer = Fp8Linear(weight, bias)
    expected = layer._product(*scaled_rows(x))
    torch.testing.assert_close(layer(x), expected, rtol=1e-2, atol=1e-2)
    exact = torch.nn.functional.linear(
        x.float(), weight.float(), None if bias is None else bias.float()
    )
    error = (layer(x).float() - exact).norm() / exact.norm()
    assert 0.005 < error < 0.05, "e4m3 costs some per cent, and something"


def test_what_is_added_is_added_and_nothing_is_a_product_of_nothing() -> None:
    layer, x, add = Fp8Linear(random(32, 16)), random(4, 16, seed=1), random(4, 32, seed=2)
    expected = layer(x) + add
    assert torch.equal(layer(x, add=add.clone()), expected)
    assert layer(x[:0]).shape == (0, 32)
    assert layer.in_float32(x).dtype == torch.float32


def test_eight_bits_on_a_card_are_fp8_where_sizes_allow() -> None:
    config = load_model_config(DEMO_MODEL)
    exact, rounding = (
        CardBackend(config, torch.device("cpu"), torch.bfloat16, weight_bits=bits)
        for bits in (16, 8)
    )
    assert isinstance(rounding.linear(random(32, 64), None), Fp8Linear)
    assert not isinstance(rounding.linear(random(32, 63), None), Fp8Linear)
    assert not isinstance(rounding.logits_linear(random(32, 64)), Fp8Linear)
    assert not isinstance(exact.linear(random(32, 64), None), Fp8Linear)


def test_on_a_cpu_fp8_is_refused_with_what_there_is_instead() -> None:
    config = EngineConfig(DEMO_MODEL, SchedulerConfig(16), device="cpu", weights="fp8")
    with pytest.raises(ConfigError, match="on a CPU use int8 or int4"):
        load_engine(config, lambda: 0.0)


@pytest.mark.parametrize("told", [{"attention": "torch"}, {"dtype": "float16"}])
def test_kv_in_fp8_is_refused_where_no_kernel_reads_it(told: dict[str, str]) -> None:
    config = EngineConfig(DEMO_MODEL, SchedulerConfig(16), device="cpu", kv_dtype="fp8", **told)
    with pytest.raises(ConfigError, match=r"kv_dtype fp8 needs our own kernels .* use auto"):
        load_engine(config, lambda: 0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_on_a_cpu_keeps_its_kv_in_fp8(dtype: str, kernels: ctypes.CDLL) -> None:
    config = EngineConfig(
        DEMO_MODEL, SchedulerConfig(16), dtype, "cpu", num_blocks=8, kv_dtype="fp8"
    )
    loaded = load_engine(config, lambda: 0.0)
    assert loaded.pool.tensor.dtype == FP8
    loaded.engine.warm_up()
    assert loaded.pool.tensor.view(torch.uint8).any(), "it was written to"


def test_a_pool_of_fp8_is_half_as_large_and_another_layout() -> None:
    config = load_model_config(DEMO_MODEL)
    wide, narrow = (config.kv_layout("m", 16, dtype) for dtype in ("bfloat16", "float8_e4m3fn"))
    assert narrow.block_bytes * 2 == wide.block_bytes
    assert narrow.fingerprint != wide.fingerprint
    pool = KvPool(narrow, 3)
    assert pool.tensor.dtype == FP8
    assert pool.tensor.nbytes == 3 * pool.block_bytes
    layers = PoolLayers(pool, config.sliding_windows, config.num_heads, torch.bfloat16)
    arguments = plan_arguments(layers, None)
    assert (arguments["q_data_type"], arguments["kv_data_type"]) == (torch.bfloat16, FP8)


@pytest.mark.parametrize(
    ("capability", "torch_version", "reason"),
    [
        ((8, 0), "2.13.0", "capability 8.9 or more, not 8.0"),
        ((8, 9), "2.11.0+cu130", "8.9 needs torch 2.12, not 2.11.0"),
        ((8, 9), "2.12.0", ""),
        ((8, 9), "3.0.0a0+git1", ""),
        ((9, 0), "2.11.0", ""),
        ((10, 0), "2.11.0", ""),
    ],
)
def test_cards_that_cannot_multiply_in_fp8_are_told(
    capability: tuple[int, int], torch_version: str, reason: str
) -> None:
    found = why_not_fp8(capability, torch_version)
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(("capability", "is_served"), [((8, 0), False), ((8, 9), True)])
def test_kv_in_fp8_is_for_cards_that_convert_to_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_served: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = EngineConfig(DEMO_MODEL, SchedulerConfig(block_size=16), kv_dtype="fp8")
    arguments = (config, torch.device("cuda"), "bfloat16")
    if is_served:
        assert choice._kv_dtype(*arguments) == "float8_e4m3fn"
    else:
        with pytest.raises(ConfigError, match=r"kv_dtype fp8 needs a card of .* 8.9 or more"):
            choice._kv_dtype(*arguments)
