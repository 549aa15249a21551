"""The Triton kernels against torch in float64: on a card, or else in Triton's interpreter.

The interpreter is asked for by TRITON_INTERPRET=1 in the environment, before anything imports
Triton. It cuts bf16 off where a card rounds it, and rounds 8 bits wrongly; what is asked of it
leaves room for that.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from engine.attention.base import KvTarget  # noqa: E402 - after the skip
from engine.gpu.fp8_linear import scaled_rows  # noqa: E402
from engine.gpu.ops import TritonOps, lowest_kept, scale_rows, store  # noqa: E402
from engine.layers.ops import TorchOps  # noqa: E402
from engine.sampling import top_p  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

EPS = 1e-5
ROUNDED_ONCE = {"rtol": 2**-7, "atol": 1e-6}
OPS = TritonOps("silu", EPS, torch.bfloat16)
Q, KV, BLOCK_SIZE, NUM_BLOCKS, LAYERS = 4, 2, 4, 6, 2


def bf16(seed: int, *shape: int) -> torch.Tensor:
    wide = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return wide.bfloat16().to(DEVICE)


def reference_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("size", [48, 64, 768])
def test_norm(rows, size):
    x, weight = bf16(0, rows, size), bf16(1, size)
    expected = reference_norm(x, weight)
    torch.testing.assert_close(OPS.norm(x, weight).double(), expected, **ROUNDED_ONCE)


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("size", [40, 1024, 1100])
def test_gate(rows, size):
    gate_up = bf16(0, rows, 2 * size)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(OPS.gate(gate_up).double(), expected, **ROUNDED_ONCE)


def test_other_activations_are_torchs():
    gate_up = bf16(0, 3, 64)
    expected = TorchOps("gelu", EPS, torch.bfloat16).gate(gate_up)
    assert torch.equal(TritonOps("gelu", EPS, torch.bfloat16).gate(gate_up), expected)


def pool(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    shape = (NUM_BLOCKS, LAYERS, 2, KV, BLOCK_SIZE, head_dim)
    return torch.full(shape, 7.0, device=DEVICE).to(dtype)


def target(tensor: torch.Tensor, slots: list[int], **scales: float) -> KvTarget:
    layer = tensor[:, 1]
    return KvTarget(layer[:, 0], layer[:, 1], torch.tensor(slots, device=DEVICE), **scales)


def test_rotation_turns_q_and_stores_k_and_v_in_their_slots_alone():
    for head_dim in (64, 128):
        for normed in (False, True):
            check_rotation(head_dim, normed)


def check_rotation(head_dim: int, normed: bool) -> None:
    slots = [5, -1, 23]  # block 1 offset 1; a token that is not stored; the last slot of all
    heads = bf16(0, len(slots), Q + 2 * KV, head_dim)
    weight = bf16(1, Q + KV, head_dim) if normed else None
    angles = torch.rand((len(slots), head_dim // 2), device=DEVICE) * 6
    tensor = pool(head_dim)
    before = heads.clone()
    q = OPS.rotate_and_store(heads, weight, (angles.cos(), angles.sin()), target(tensor, slots))
    wide = before[:, : Q + KV].double()
    if weight is not None:
        wide = reference_norm(before[:, : Q + KV], weight)
    first, second = wide.chunk(2, dim=-1)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    loose = {"rtol": 2**-7, "atol": 2e-2}  # cancelling terms keep the error of the large ones
    torch.testing.assert_close(q.double(), turned[:, :Q], **loose)
    assert torch.equal(heads[:, Q:], before[:, Q:])
    expected = pool(head_dim)
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, BLOCK_SIZE)
            stored = tensor[block, 1, :, :, offset]  # [2, KV, head_dim]
            torch.testing.assert_close(stored[0].double(), turned[token, Q:], **loose)
            assert torch.equal(stored[1], before[token, Q + KV :])
            expected[block, 1, :, :, offset] = stored
    assert torch.equal(tensor, expected)  # nothing else was written


def test_storing_alone_keeps_keys_as_they_are():
    heads, tensor = bf16(0, 2, 2 * KV, 64), pool(64)
    store(heads, target(tensor, [9, 0]))
    assert torch.equal(tensor[2, 1, 0, :, 1], heads[0, :KV])
    assert torch.equal(tensor[0, 1, 1, :, 0], heads[1, KV:])


def test_8_bit_pools_hold_scaled_and_clamped_values():
    heads = torch.arange(-8, 8).repeat(2 * KV * 64 // 16).view(1, 2 * KV, 64).bfloat16().to(DEVICE)
    expected = heads.float()  # numbers that 8 bits hold, divided by either scale, too
    heads[0, 0, 0], heads[0, 0, 1] = 1e5, -1e5
    tensor = pool(64, torch.float8_e4m3fn)
    store(heads, target(tensor, [3], k_scale=2.0, v_scale=0.5))
    stored = tensor[0, 1, :, :, 3].float()
    assert stored[0, 0, 0] == 448.0
    assert stored[0, 0, 1] == -448.0
    assert torch.equal(stored[0].flatten()[2:] * 2.0, expected[0, :KV].flatten()[2:])
    assert torch.equal(stored[1] * 0.5, expected[0, KV:])


@pytest.mark.parametrize("size", [16, 96, 1000])
def test_rows_scaled_for_fp8_are_those_of_torch(size):
    x = (bf16(0, 5, size) * torch.tensor([[1e-3], [1], [0], [40], [1]], device=DEVICE)).bfloat16()
    x[4, 3] = torch.nan
    expected, expected_scales = scaled_rows(x)
    values, scales = scale_rows(x)
    torch.testing.assert_close(scales[:4], expected_scales[:4])
    close = torch.isclose(values[:4].float(), expected[:4].float(), rtol=0.13, atol=0.002)
    assert close.float().mean() > 0.95, "but for what the interpreter rounds into another binade"
    assert scales[4].isnan(), "the row's products are NaN"


@pytest.mark.parametrize("share", [0.0, 1e-9, 0.3, 0.9, 0.999999, 1.0])
@pytest.mark.parametrize(("vocab", "decimals"), [(1, 7), (7, 0), (1024, 1), (3000, 7)])
def test_the_cut_of_top_p_is_that_of_the_radix_search(
    vocab: int, decimals: int, share: float
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    scaled = (torch.randn((4, vocab), generator=generator) * 4).round(decimals=decimals)
    scaled[1:, 1:3] = -torch.inf  # as a mask leaves them
    scaled = (scaled - scaled.amax(dim=-1, keepdim=True)).to(DEVICE)
    weights = (scaled.exp() * 2.0**39).to(torch.int64)
    needed = weights.sum(dim=-1, keepdim=True).double() * share
    found, expected = (
        lowest_kept(scaled, weights, needed),
        top_p.lowest_kept(scaled, weights, needed),
    )
    assert torch.equal(found, expected)


def test_the_cut_may_be_any_value() -> None:
    values = [3e38, 2.5, 1e-45, 0.0, -1e-45, -2.5, -3e38, -torch.inf]
    scaled = torch.tensor([values] * len(values), device=DEVICE)
    weights = torch.ones_like(scaled, dtype=torch.int64)
    needed = torch.arange(1, 9, device=DEVICE, dtype=torch.float64)[:, None]
    assert lowest_kept(scaled, weights, needed).flatten().tolist() == scaled[0].tolist()


def test_a_row_without_a_cut_has_none() -> None:
    scaled = torch.tensor([[torch.nan, 0.0, -1.0], [0.0, -1.0, -9.0]], device=DEVICE)
    weights = (scaled.nan_to_num().exp() * 2.0**39).to(torch.int64)
    needed = torch.tensor([[1e30], [2.0**39 + 5]], dtype=torch.float64, device=DEVICE)
    found = lowest_kept(scaled, weights, needed)
    assert found[0].isnan().all()
    assert found[1].item() == -1.0
