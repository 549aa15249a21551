"""Which kernels ./scripts/compile_gpu_kernels compiles; the compilers themselves run outside of the
suite."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from bench.gpu.compile_kernels import KINDS, main, variants
from engine.attention.flashinfer_attention import HEAD_DIMS, choose_kernels
from engine.gpu.fp8_format import FP8

DTYPES = ("bfloat16", "float16")


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (10, 2), (64, 8)])
def test_every_choice_of_a_backend_is_compiled(capability: int, heads: tuple[int, int]) -> None:
    compiled = {
        (each.kind, each.dtype, each.kv_dtype)
        for each in variants(KINDS, DTYPES, HEAD_DIMS, capability)
    }
    for dtype in DTYPES:
        plain = getattr(torch, dtype)
        for kv_dtype in (plain, FP8) if capability >= 89 else (plain,):
            choice = choose_kernels(*heads, kv_dtype, is_hopper=capability == 90)
            decode = "fa2" if choice.decode_on_tensor_cores else "decode"
            assert {(choice.prefill, dtype, kv_dtype), (decode, dtype, kv_dtype)} <= compiled
            if choice.prefill == "fa3":  # what replaces it
                assert ("fa2", dtype, kv_dtype) in compiled


def test_every_head_size_is_compiled_with_and_without_a_window() -> None:
    found = list(variants(("decode",), ("bfloat16",), HEAD_DIMS, 80))
    assert {(each.head_dim, each.has_window) for each in found} == {
        (size, window) for size in HEAD_DIMS for window in (False, True)
    }
    assert len({str(each) for each in found}) == len(found)


def test_fa3_is_for_hopper_alone() -> None:
    assert not list(variants(("fa3",), DTYPES, HEAD_DIMS, 80))
    assert not [v for v in variants(("fa3",), DTYPES, HEAD_DIMS, 90) if v.kv_dtype == FP8]


def test_cards_without_fp8_have_no_kernels_for_it() -> None:
    assert not [v for v in variants(KINDS, DTYPES, HEAD_DIMS, 80) if v.kv_dtype == FP8]


def test_a_missing_triton_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["compile_gpu_kernels", "--kind", "triton"])
    assert main() == 1
    assert capsys.readouterr().err == (
        "no kernel can be built: install triton, or name other kinds (--kind)\n"
    )
