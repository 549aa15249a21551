"""Products of bf16 pairs by dot products, by fused multiply-adds and by those of half vectors, and
what stands between: the same bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import Segment
from engine.attention.cpu_attention import KernelAttention
from engine.cpu.native_linear import NativeLinear
from engine.cpu.native_ops import NativeOps
from engine.kv_pool import KvPool
from tests.effort import times
from tests.unit.engine.attention.attention_shapes import Shape
from tests.unit.engine.native.instruction_sets import kernels_for, usable_instruction_sets

SETS = [name for name in ("avx512_bf16", "avx512", "avx2") if name in usable_instruction_sets()]
if len(SETS) < 2:
    pytest.skip("this CPU has not two of these instruction sets", allow_module_level=True)

ODD_NUMBERS = (0.0, -0.0, 1e-40, -1e-40, 2.0**-126, -(2.0**-127), 1e-20, 1e20, float("inf"))
"""Some are not normal, and count as zeros."""


def numbers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """bf16, of which some are odd."""
    found = torch.randn(shape, generator=generator).bfloat16()
    flat = found.view(-1)
    for number in ODD_NUMBERS:
        flat[torch.randint(0, len(flat), (len(flat) // 2000,), generator=generator)] = number
    return found


@settings(max_examples=times(25, 60), deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 50) | st.integers(90, 300),
    groups=st.integers(1, 20),
    more_inputs=st.sampled_from([0, 2, 30]),
    outputs=st.integers(1, 200),
    bits=st.sampled_from([16, 12, 8, 4]),
)
def test_linear_layers(rows, groups, more_inputs, outputs, bits):
    inputs = 64 * groups + more_inputs
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn((outputs, inputs), generator=generator).bfloat16(), None
    if rows % 2:
        bias = torch.randn((outputs,), generator=generator).bfloat16()
    x, add = numbers(generator, rows, inputs), numbers(generator, rows, outputs)
    x[::3] *= 1e-38  # most are not normal then, and some of their sums
    results = []
    for name in SETS:
        layer = NativeLinear(weight, bias, kernels_for(name), bits)
        rounded, wide = layer(x, add=add), layer.in_float32(x)
        results.append((rounded.nan_to_num(nan=7.0), wide.nan_to_num(nan=7.0)))
    for others in results[1:]:
        for ours, theirs, whole in zip(results[0], others, (torch.int16, torch.int32), strict=True):
            assert torch.equal(ours.view(whole), theirs.view(whole))


@settings(max_examples=times(25, 60), deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([(4, 4), (12, 4), (16, 2), (9, 1)]),
    head_dim=st.sampled_from([16, 64, 80, 128, 192]),
    texts=st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 100) | st.just(1)), min_size=1, max_size=4
    ),
    window=st.sampled_from([None, 37]),
    order=st.integers(0, 2),
)
def test_attention(heads, head_dim, texts, window, order):
    """Of prompts and of single tokens, over blocks in each order."""
    shape = Shape(*heads, head_dim, 16, "bfloat16", (window, None), order)
    num_blocks = [-(-(before + now) // 16) for before, now in texts]
    results, pools = [], []
    for name in SETS:
        generator = torch.Generator().manual_seed(head_dim)
        library = kernels_for(name)
        pool = KvPool(shape.layout(library), sum(num_blocks))
        pool.tensor.zero_()
        backend = KernelAttention(pool, shape.windows, shape.num_heads, library)
        free = iter(torch.randperm(sum(num_blocks), generator=generator).tolist())
        tables = [[next(free) for _ in range(count)] for count in num_blocks]
        found = []
        for step in (0, 1):
            segments = [
                Segment(text[step], sum(text[: step + 1]), table)
                for text, table in zip(texts, tables, strict=True)
                if text[step]
            ]
            rows = sum(segment.query_len for segment in segments)
            if not segments:
                continue
            backend.plan(segments)
            q = torch.randn((rows, heads[0], head_dim), generator=generator).bfloat16()
            k, v = torch.randn((2, rows, heads[1], head_dim), generator=generator).bfloat16()
            k.view(-1)[::997] = 1e-40
            v.view(-1)[::991] = 1e-30
            found.append(backend.run(0, q, k, v).view(torch.int16))
        results.append(found)
        pools.append(pool.tensor.view(torch.uint8))
    assert len(results[0]) > 0
    for others, pool in zip(results[1:], pools[1:], strict=True):
        for ours, theirs in zip(results[0], others, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(pools[0], pool)


@settings(max_examples=times(25, 40), deadline=None, derandomize=True)
@given(rows=st.integers(1, 9), size=st.sampled_from([16, 64, 70, 768]), small=st.booleans())
def test_what_stands_between(rows, size, small):
    """`small`: many results are not normal, and become zero in whole vectors."""
    generator = torch.Generator().manual_seed(size)
    x, weight = numbers(generator, rows, size), numbers(generator, size)
    heads, gate_up = numbers(generator, rows, 3, size), numbers(generator, rows, 2 * size)
    angles = torch.randn((rows, size // 2), generator=generator)
    if small:
        weight *= 1e-38
        heads *= 1e-38
        gate_up *= 1e-19
    results = []
    for name in SETS:
        ops = NativeOps("silu", 1e-6, kernels_for(name))
        turned = ops.rotate(heads.clone(), None, (angles.cos(), angles.sin()))
        tanh = NativeOps("gelu_new", 1e-6, kernels_for(name)).gate(gate_up)
        results.append((ops.norm(x, weight.float()), ops.gate(gate_up), turned, tanh))
    for ours, *others in zip(*results, strict=True):
        if small and size % 32 == 0:
            assert (ours == 0).sum() > (ours.numel() + 9) // 10
        for theirs in others:
            bits = [each.nan_to_num(nan=7.0).view(torch.int16) for each in (ours, theirs)]
            assert torch.equal(*bits)
