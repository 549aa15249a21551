"""Mixtures by our own kernels: as torch's in fp32, the same bits in any batch, and no expert's
weights read but those that were chosen."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.experts_config import ExpertsConfig
from engine.checkpoint.quantized_blocks import BlockMatrix, BlockRows
from engine.cpu.huge_pages import HugePages
from engine.cpu.integer_weights import GROUP_INPUTS, quantize
from engine.cpu.native_experts import ExpertsMemory, NativeExperts
from engine.cpu.native_linear import NativeLinear
from engine.cpu.native_ops import GATES
from engine.cpu.rounded_rows import KINDS, RoundedRows, can_round
from engine.layers.experts import ExpertWeights, TorchExperts
from engine.layers.linear import TorchLinear
from engine.layers.ops import TorchOps
from engine.layers.routing import choose
from engine.models.architectures import CLAMPED_SWIGLU
from engine.native.library import load_library
from tests.effort import pairwise, times
from tests.forked import fork_context
from tests.unit.engine.native.instruction_sets import kernels_for, usable_instruction_sets

OPS = TorchOps("silu", 1e-5, torch.float32)
CONFIGS = {
    "normalized": ExpertsConfig(8, 2, 48),
    "gpt-oss": ExpertsConfig(8, 2, 48, has_biases=True),
    "many": ExpertsConfig(40, 6, 72, normalizes=False, shared_inner=32, shared_name="s"),
    "gated": ExpertsConfig(5, 5, 64, shared_inner=96, shared_name="s", gates_shared=True),
    "groups": ExpertsConfig(
        24, 4, 64, "sigmoid", True, 2.5, has_choice_bias=True, groups=6, chosen_groups=3,
        sums_two=True,
    ),
    "largest of groups": ExpertsConfig(
        16, 3, 64, normalizes=False, scale=1.5, groups=4, chosen_groups=2
    ),
}  # fmt: skip
WITHOUT_BIASES = [name for name, config in CONFIGS.items() if not config.has_biases]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weights(config: ExpertsConfig, hidden: int, scale: float = 0.1) -> ExpertWeights:
    def gated(seed: int, inner: int) -> list[torch.Tensor]:
        shapes = ((2 * inner, hidden), (hidden, inner))
        return [(scale * numbers(seed + i, *shape)).bfloat16() for i, shape in enumerate(shapes)]

    experts = [gated(10 + 2 * expert, config.inner) for expert in range(config.count)]
    shared = gated(2, config.shared_inner) if config.shared_inner else [None, None]
    return ExpertWeights(
        numbers(0, config.count, hidden),
        0.3 * numbers(1, config.count) if config.has_choice_bias else None,
        [gate_up for gate_up, _ in experts],
        [down for _, down in experts],
        *shared,
        numbers(4, 1, hidden) if config.gates_shared else None,
        *(random_biases(config, hidden) if config.has_biases else ()),
    )


def random_biases(config: ExpertsConfig, hidden: int) -> tuple[Any, ...]:
    """Of the router, and of each expert; large enough for the activation's limits."""
    experts = range(config.count)
    gate_up = [5 * numbers(100 + each, 2 * config.inner).bfloat16() for each in experts]
    return numbers(5, config.count), gate_up, [numbers(200 + e, hidden).bfloat16() for e in experts]


def native(
    config: ExpertsConfig,
    weights: ExpertWeights,
    kernels,
    bits: int = 12,
    int8_inputs: bool = False,
) -> NativeExperts:
    hidden = weights.router.shape[1]

    def pack(matrix, bias):
        return NativeLinear(matrix, bias, kernels, bits, HugePages(), int8_inputs)

    gate = GATES[CLAMPED_SWIGLU if config.has_biases else "silu"]
    return NativeExperts(config, weights, pack, ExpertsMemory(config, hidden), kernels, gate)


def wide_weights(config: ExpertsConfig, hidden: int, bits: int = 16) -> ExpertWeights:
    """The random weights in fp32, rounded to so many bits."""

    def rounded(matrix):
        if bits in KINDS and can_round(matrix):
            return RoundedRows(matrix, KINDS[bits], load_library()).dequantized()
        is_rounded = bits == 8 and matrix.shape[1] % GROUP_INPUTS == 0
        return quantize(matrix).dequantized() if is_rounded else matrix.float()

    weights = random_weights(config, hidden)
    weights.gate_up = [rounded(each) for each in weights.gate_up]
    weights.down = [rounded(each) for each in weights.down]
    if weights.shared_gate_up is not None:
        weights.shared_gate_up = rounded(weights.shared_gate_up)
        weights.shared_down = rounded(weights.shared_down)
    return weights


def in_float32(config: ExpertsConfig, hidden: int, bits: int = 16) -> TorchExperts:
    """The same experts in fp32, their weights rounded to so many bits."""
    return TorchExperts(config, wide_weights(config, hidden, bits), TorchLinear)


def in_float64(config: ExpertsConfig, weights: ExpertWeights, x: torch.Tensor) -> torch.Tensor:
    """The sum of the chosen experts with biases, each stage rounded to bf16 as the kernels do: with
    numbers as large as biases make them, roundings count more than any tolerance for small ones."""

    def rounded(stage):
        return stage.bfloat16().double()

    chosen, scores = choose(config, x.float() @ weights.router.T + weights.router_bias, None)
    shares = torch.zeros(len(x), config.count).scatter_(1, chosen, scores).double()
    y = torch.zeros(x.shape, dtype=torch.float64)
    for expert, share in enumerate(shares.T):
        gate_up = x.double() @ weights.gate_up[expert].double().T + weights.gate_up_bias[expert]
        gate, up = rounded(gate_up).chunk(2, dim=1)
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        gated = rounded(gate * torch.sigmoid(1.702 * gate) * (up + 1))
        down = gated @ weights.down[expert].double().T + weights.down_bias[expert]
        y += share.unsqueeze(1) * rounded(down)
    return y


@pairwise("bits, rows, adds", [16, 12, 8, 4], [0, 1, 3, 17, 150, 700], [False, True])
def test_with_biases_as_in_fp64_rounded_at_the_same_stages(product_kernels, bits, rows, adds):
    config, hidden = CONFIGS["gpt-oss"], 64
    x = numbers(7, rows, hidden).bfloat16()
    add = numbers(8, rows, hidden).bfloat16() if adds else None
    y = native(config, random_weights(config, hidden), product_kernels, bits)(x, OPS, add)
    expected = in_float64(config, wide_weights(config, hidden, bits), x)
    expected += 0 if add is None else add.double()
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2**-6)


@pairwise(
    "name, bits, rows, adds", WITHOUT_BIASES, [16, 12, 8, 4], [0, 1, 3, 17, 150, 700], [False, True]
)
def test_as_torch_in_fp32(product_kernels, name, bits, rows, adds):
    config, hidden = CONFIGS[name], 64
    x = numbers(7, rows, hidden).bfloat16()
    add = numbers(8, rows, hidden).bfloat16() if adds else None
    layer = native(config, random_weights(config, hidden), product_kernels, bits)
    reference = in_float32(config, hidden, bits)
    expected = reference(x.float(), OPS, None if add is None else add.float())
    y = layer(x, OPS, add)
    torch.testing.assert_close(y.float(), expected, rtol=2**-7, atol=2**-6)
    assert torch.equal(layer.tally, reference.tally)
    assert layer.tally[0] == rows * config.per_token


def in_blocks(matrix: torch.Tensor, kind: str) -> BlockMatrix:
    rows = gguf.quants.quantize(matrix.float().numpy(), gguf.GGMLQuantizationType[kind])
    return BlockMatrix([BlockRows(torch.from_numpy(rows), kind)])


@pytest.mark.parametrize("rows", [1, 40])
def test_blocks_of_different_kinds_are_multiplied_as_they_are(product_kernels, rows):
    config, hidden = CONFIGS["largest of groups"], 96
    blocks, values = random_weights(config, hidden), random_weights(config, hidden)
    for expert in range(config.count):
        kind = ("Q4_0", "Q8_0")[expert % 2]
        for of_blocks, of_values in ((blocks.gate_up, values.gate_up), (blocks.down, values.down)):
            of_blocks[expert] = in_blocks(of_blocks[expert], kind)
            of_values[expert] = of_blocks[expert].dequantized()
    layer = native(config, blocks, product_kernels)
    x = numbers(7, rows, hidden).bfloat16()
    expected = TorchExperts(config, values, TorchLinear)(x.float(), OPS, None)
    torch.testing.assert_close(layer(x, OPS, None).float(), expected, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_inputs_of_8_bits_are_close_and_the_same_in_any_batch(int8_kernels, bits):
    config, hidden = CONFIGS["gated"], 64
    x = numbers(7, 200, hidden).bfloat16()
    weights = [random_weights(config, hidden) for _ in range(2)]
    plain = native(config, weights[0], int8_kernels, bits)(x, OPS, None).float()
    layer = native(config, weights[1], int8_kernels, bits, int8_inputs=True)
    whole = layer(x, OPS, None)
    assert 1e-3 < (whole.float() - plain).norm() / plain.norm() < 0.02
    for begin, end in ((0, 1), (5, 7), (100, 200)):
        assert torch.equal(layer(x[begin:end], OPS, None), whole[begin:end])


def test_inputs_have_8_bits_for_all_experts_or_none(int8_kernels):
    config, hidden = CONFIGS["largest of groups"], 96

    def mixed() -> ExpertWeights:
        weights = random_weights(config, hidden)
        for matrices in (weights.gate_up, weights.down):
            matrices[::2] = [in_blocks(each, "Q8_0") for each in matrices[::2]]
        return weights

    x = numbers(7, 40, hidden).bfloat16()
    layers = [native(config, mixed(), int8_kernels, int8_inputs=each) for each in (True, False)]
    assert torch.equal(layers[0](x, OPS, None), layers[1](x, OPS, None))


@settings(max_examples=times(8, 60), deadline=None, derandomize=True)
@given(
    name=st.sampled_from(list(CONFIGS)),
    rows=st.integers(1, 60) | st.integers(200, 900),
    bits=st.sampled_from([16, 12]),
    threads=st.integers(1, 4),
    data=st.data(),
)
def test_a_row_is_the_same_in_any_batch(product_kernels, name, rows, bits, threads, data):
    config = CONFIGS[name]
    layer = native(config, random_weights(config, 48), product_kernels, bits)
    x, add = numbers(7, rows, 48).bfloat16(), numbers(8, rows, 48).bfloat16()
    whole = layer(x, OPS, add)
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(layer(x[begin:end], OPS, add[begin:end]), whole[begin:end])
    finally:
        torch.set_num_threads(before)


def test_the_same_bits_by_each_instruction_set():
    sets = [name for name in ("avx512_bf16", "avx512", "avx2") if name in usable_instruction_sets()]
    if len(sets) < 2:
        pytest.skip("this CPU has not two of these instruction sets")
    config = CONFIGS["gated"]
    x = numbers(7, 200, 80).bfloat16()
    first, *others = [
        native(config, random_weights(config, 80), kernels_for(name))(x, OPS, None) for name in sets
    ]
    assert all(torch.equal(first, other) for other in others)


def test_one_expert_may_have_all_rows(product_kernels):
    """More than share an item, of every panel, while most experts have none."""
    config = ExpertsConfig(64, 1, 136)
    weights = random_weights(config, 72)
    weights.router.zero_()
    weights.router[37] = 1.0
    reference = in_float32(config, 72)
    reference._router = weights.router
    layer = native(config, weights, product_kernels)
    x = numbers(7, 333, 72).abs().bfloat16()
    torch.testing.assert_close(
        layer(x, OPS, None).float(), reference(x.float(), OPS, None), rtol=2**-7, atol=2**-5
    )
    assert layer.tally.tolist() == [333, 333, 1]


def test_a_logit_that_is_no_number_spoils_its_own_row_only(product_kernels):
    config = CONFIGS["normalized"]
    layer = native(config, random_weights(config, 48), product_kernels)
    x = numbers(7, 9, 48).bfloat16()
    expected = layer(x, OPS, None)
    x[4, 3] = torch.nan
    y = layer(x, OPS, None)
    assert y[4].isnan().all()
    rest = [row for row in range(9) if row != 4]
    assert torch.equal(y[rest], expected[rest])


def test_a_decode_reads_the_chosen_experts_only(kernels):
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    decoding = fork_context().Process(target=_decode_without_the_others)
    decoding.start()
    decoding.join(60)
    assert decoding.exitcode == 0


def _decode_without_the_others() -> None:
    """Takes all other experts' pages away, so that a read of them would end this process."""
    torch.set_num_threads(1)
    config, hidden = ExpertsConfig(16, 2, 192), 256
    weights = random_weights(config, hidden)
    router = weights.router
    layer = native(config, weights, load_library())
    x = numbers(7, 1, hidden).bfloat16()
    expected = layer(x, OPS, None)
    chosen = set(choose(config, x.float() @ router.T, None)[0].flatten().tolist())
    for expert in set(range(config.count)) - chosen:
        for each in (layer.gate_up[expert], layer.down[expert]):
            _take_away(each._panels)
    assert torch.equal(layer(x, OPS, None), expected)


def _take_away(panels: torch.Tensor) -> None:
    """All whole pages of a tensor that is the first of its mapping."""
    assert panels.data_ptr() % mmap.PAGESIZE == 0
    size = panels.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
    assert size
    failed = ctypes.CDLL(None).mprotect(
        ctypes.c_void_p(panels.data_ptr()), ctypes.c_size_t(size), 0
    )
    assert not failed
