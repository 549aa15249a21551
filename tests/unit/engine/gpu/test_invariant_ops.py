"""Products with fixed tiles against float64, and that a row's bits are the same in every batch.

On a card, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from engine.gpu import invariant_ops  # noqa: E402 - after the skip
from engine.gpu.invariant_linear import InvariantLinear  # noqa: E402
from engine.gpu.ops import TritonOps  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # what the interpreter multiplies


def narrow(seed: int, *shape: int) -> torch.Tensor:
    wide = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return wide.to(DTYPE).to(DEVICE)


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 40), (200, 130), (1100, 96), (2048, 128)])
@pytest.mark.parametrize("few_tiles", [0, 64])
def test_products_are_those_of_float64(monkeypatch, inputs: int, outputs: int, few_tiles) -> None:
    monkeypatch.setattr(invariant_ops, "_FEW_TILES", few_tiles)
    weight, bias = narrow(0, outputs, inputs), narrow(1, outputs)
    for rows in (0, 1, 70):
        x, add = narrow(2, rows, inputs), narrow(3, rows, outputs)
        exact = x.double() @ weight.double().T
        layer = InvariantLinear(weight, bias, invariant_ops.multiply)
        loose = {"rtol": 2**-7, "atol": 0.02}
        torch.testing.assert_close(layer.in_float32(x).double(), exact + bias.double(), **loose)
        plain = InvariantLinear(weight, None, invariant_ops.multiply)
        torch.testing.assert_close(plain(x).double(), exact, **loose)
        expected = exact + add.double()
        total = plain(x, add)
        assert total.data_ptr() == add.data_ptr()
        torch.testing.assert_close(total.double(), expected, **loose)


@pytest.fixture
def rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's product in the interpreter is numpy's, whose library rounds a row by its place; a
    card's does not."""

    def matmul(left: np.ndarray, right: np.ndarray, dtype: type) -> np.ndarray:
        right = np.ascontiguousarray(right.T).astype(dtype)
        return np.stack([(row * right).sum(axis=1) for row in left.astype(dtype)])

    if DEVICE == "cpu":
        monkeypatch.setattr(np, "matmul", matmul)


@pytest.mark.usefixtures("rows_apart")
@pytest.mark.parametrize("inputs", [200, 2500])
def test_a_rows_bits_do_not_depend_on_other_rows(monkeypatch, inputs: int) -> None:
    weight, bias, x = narrow(0, 130, inputs), narrow(1, 130), narrow(2, 150, inputs)
    layer = InvariantLinear(weight, bias, invariant_ops.multiply)
    whole = layer.in_float32(x)
    for few_tiles in (0, 64):  # by one program for all parts, or one for each
        monkeypatch.setattr(invariant_ops, "_FEW_TILES", few_tiles)
        for rows in ([0], [149], [3, 140], list(range(149, -1, -1)), [77] * 65):
            assert torch.equal(layer.in_float32(x[rows]), whole[rows])
            add = narrow(3, 1, 130).expand(len(rows), -1).contiguous()
            alone = [layer(x[row][None], add[:1].clone()) for row in rows[:2]]
            assert torch.equal(layer(x[rows], add)[: len(alone)], torch.cat(alone))


@pytest.mark.usefixtures("rows_apart")
def test_tiles_that_depend_on_the_batch_are_found_out(monkeypatch) -> None:
    """The test above can fail."""
    weight, x = narrow(0, 130, 2500), narrow(2, 150, 2500)
    layer = InvariantLinear(weight, None, invariant_ops.multiply)
    whole = layer.in_float32(x)
    monkeypatch.setattr(invariant_ops, "_PART", 512)
    assert not torch.equal(layer.in_float32(x[:1]), whole[:1])


def test_norms_and_gates_are_row_by_row() -> None:
    ops, x, weight = TritonOps("silu", 1e-5, DTYPE), narrow(0, 37, 200), narrow(1, 200)
    for rows in ([0], [36], [5, 30, 5]):
        assert torch.equal(ops.norm(x[rows], weight), ops.norm(x, weight)[rows])
        assert torch.equal(ops.gate(x[rows]), ops.gate(x)[rows])


@pytest.mark.parametrize("size", [7, 4096, 5000])
def test_totals_of_log_probabilities_are_those_of_float64(size: int) -> None:
    logits = 9 * torch.randn((3, size), generator=torch.Generator().manual_seed(0))
    logits = logits.to(DEVICE)
    totals = invariant_ops.log_totals(logits)
    expected = logits.double().logsumexp(dim=-1, keepdim=True)
    torch.testing.assert_close(totals.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(invariant_ops.log_totals(logits[1:2]), totals[1:2])
