"""The kernels between matrix products against the same arithmetic in float64."""

from __future__ import annotations

import pytest
import torch

from engine.cpu.native_ops import NativeOps
from tests.unit.engine.native.instruction_sets import kernels_for

EPS = 1e-5
ROWS = [0, 1, 3, 300]
SIZES = [2, 48, 64, 200, 768]
ROUNDED_ONCE = {"rtol": 2**-8, "atol": 1e-6}


def bf16(seed: int, *shape: int) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


@pytest.fixture
def ops(instruction_set) -> NativeOps:
    return NativeOps("silu", EPS, kernels_for(instruction_set))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return wide * scale * weight.double()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_norm(ops, rows, size):
    x, weight = bf16(0, rows, size), bf16(1, size).float()
    torch.testing.assert_close(ops.norm(x, weight).double(), norm(x, weight), **ROUNDED_ONCE)
    add = bf16(2, rows, size)
    expected = add.double() + norm(x, weight)
    torch.testing.assert_close(
        ops.norm(x, weight, add=add).double(), expected, rtol=2**-8, atol=1e-5
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_gate(ops, rows, size):
    gate_up = 10 * bf16(0, rows, 2 * size)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(ops.gate(gate_up).double(), expected, **ROUNDED_ONCE)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", [2, 16, 40, 64, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_of_q_and_k_leaves_v(ops, rows, head_dim, normed):
    heads = bf16(0, rows, 5, head_dim)
    qk, v = heads[:, :3], heads[:, 3:].clone()
    weight = bf16(1, 3, head_dim).float() if normed else None
    angles = torch.rand((rows, head_dim // 2), generator=torch.Generator().manual_seed(2)) * 6
    wide = qk.double() if weight is None else norm(qk, weight)
    first, second = wide.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    expected = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    out = ops.rotate(qk, weight, (cos, sin))
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-5)
    assert torch.equal(heads[:, 3:], v)


def test_nan_and_infinity_show(ops):
    assert ops.norm(torch.full((1, 64), torch.nan).bfloat16(), bf16(0, 64).float()).isnan().all()
    gate_up = torch.tensor([[torch.nan] * 16 + [1.0] * 16]).bfloat16()
    assert ops.gate(gate_up).isnan().all()
    gate_up = torch.tensor([[torch.inf, -torch.inf] * 8 + [1.0] * 16]).bfloat16()
    expected = torch.nn.functional.silu(gate_up[:, :16].float())
    assert torch.equal(ops.gate(gate_up)[:, ::2].float(), expected[:, ::2])


@pytest.mark.parametrize("hidden_act", ["gelu_new", "gelu_fast", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_the_gate_of_a_tanh(kernels, hidden_act, rows, size):
    gate_up = 3 * bf16(0, rows, 2 * size)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    gated = NativeOps(hidden_act, EPS, kernels).gate(gate_up)
    torch.testing.assert_close(gated.double(), expected, **ROUNDED_ONCE)


def test_another_gate_is_torchs(kernels):
    gate_up = bf16(0, 4, 64)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = torch.nn.functional.gelu(gate) * up
    assert torch.equal(NativeOps("gelu", EPS, kernels).gate(gate_up), expected)
