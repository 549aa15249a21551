"""Pools whose numbers lie apart by their bits: the same numbers, whatever they are."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.attention.base import Segment
from engine.attention.cpu_attention import KernelAttention, orders_for
from engine.kv_pool import KvPool
from protocol.layout import PAIRS, SPLIT
from scheduling.block_manager import BlockManager
from tests.effort import times
from tests.unit.engine.attention.attention_shapes import NUM_LAYERS, Shape, in_order
from tests.unit.engine.native.instruction_sets import instruction_sets_with_products, kernels_for

SETS = instruction_sets_with_products()
if not SETS:
    pytest.skip("this CPU has no bf16 products", allow_module_level=True)

WIDE, UNKNOWN = 254, 255  # as in native/split.h


def pools_of(shape: Shape, num_blocks: int, instruction_set: str) -> dict[str, KvPool]:
    """Zeroed, of the kernel's two orders."""
    layout = shape.layout(kernels_for(instruction_set))
    assert layout.order == SPLIT
    return {
        order: KvPool(msgspec.structs.replace(layout, order=order), num_blocks)
        for order in (PAIRS, SPLIT)
    }


def attention_over(pool: KvPool, shape: Shape, instruction_set: str) -> KernelAttention:
    return KernelAttention(pool, shape.windows, shape.num_heads, kernels_for(instruction_set))


def numbers(
    kind: str, shape: tuple[int, ...], generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """q, k and v of bf16: how far their exponents lie apart."""
    found = torch.randn((3, *shape), generator=generator)
    if kind == "far apart":
        found *= torch.exp2(torch.randint(-20, 3, found.shape, generator=generator))
    elif kind == "some far apart":
        found *= torch.exp2(-20.0 * (torch.rand(found.shape, generator=generator) < 0.01))
    elif kind == "zeros":
        found *= torch.rand(found.shape, generator=generator) < 0.9
    elif kind == "tiny":
        found *= 1e-37
    elif kind == "huge":
        found[1:] *= 2.0**30
    return tuple(found.bfloat16())


@settings(max_examples=times(25, 60), deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (12, 4), (8, 2), (14, 2), (16, 2), (9, 1), (34, 2)]),
    head_dim=st.sampled_from([64, 128, 192]),
    block_size=st.sampled_from([16, 48]),
    lengths=st.lists(st.integers(1, 90) | st.just(1), min_size=1, max_size=20),
    kind=st.sampled_from(["near", "far apart", "some far apart", "zeros", "tiny", "huge"]),
    instruction_set=st.sampled_from(SETS),
)
@example((12, 4), 64, 16, [70, *[1] * 30], "near", SETS[0])
@example((12, 4), 64, 16, [70, *[1] * 30], "some far apart", SETS[-1])
def test_no_bit_changes(heads, head_dim, block_size, lengths, kind, instruction_set):
    """One text in pieces: what lies near is read by its span, or not, from piece to piece."""
    shape = Shape(*heads, head_dim, block_size, "bfloat16", (None, 33))
    num_blocks = -(-sum(lengths) // block_size)
    pools = pools_of(shape, num_blocks, instruction_set)
    for order, pool in pools.items():  # with what was there before, a group has a span early
        pool.tensor.copy_(in_order(torch.ones_like(pool.tensor), order))
    backends = {
        order: attention_over(pool, shape, instruction_set) for order, pool in pools.items()
    }
    generator = torch.Generator().manual_seed(11)
    table = torch.randperm(num_blocks, generator=generator).tolist()
    context = 0
    for length in lengths:
        context += length
        for layer in range(NUM_LAYERS):
            q, k, v = numbers(kind, (length, heads[0], head_dim), generator)
            k, v = k[:, : heads[1]].contiguous(), v[:, : heads[1]].contiguous()
            results = []
            for backend in backends.values():
                backend.plan([Segment(length, context, table)])
                results.append(backend.run(layer, q, k, v).view(torch.int16))
            assert torch.equal(*results)


@pytest.mark.parametrize("instruction_set", SETS)
def test_every_number_is_kept(instruction_set):
    """All 2^16, also those that none of the others is near: one token sees one value alone."""
    shape = Shape(1, 1, 64, 16, "bfloat16")
    pools = pools_of(shape, 1, instruction_set)
    attention = attention_over(pools[SPLIT], shape, instruction_set)
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    normal = bits.isfinite() & (bits.abs() >= torch.finfo(torch.bfloat16).tiny) | (bits == 0)
    kept = bits[normal]
    values = torch.cat([kept, kept.new_zeros(-len(kept) % 64)]).reshape(-1, 1, 1, 64)
    zeros = torch.zeros((1, 1, 64), dtype=torch.bfloat16)
    attention.plan([Segment(1, 1, [0])])
    for value in values:
        assert torch.equal(attention.run(0, zeros, zeros, value), value)


@pytest.mark.parametrize("instruction_set", SETS)
def test_spans_are_noted_when_they_are_read(instruction_set):
    shape = Shape(4, 2, 64, 16, "bfloat16")
    pool = pools_of(shape, 2, instruction_set)[SPLIT]
    assert pool.spans is not None
    assert pool.spans.shape == (NUM_LAYERS, 2, 2 * 2 * 8)
    assert bool((pool.spans == UNKNOWN).all())
    attention = attention_over(pool, shape, instruction_set)
    generator = torch.Generator().manual_seed(3)
    q, k, v = numbers("near", (17, 4, 64), generator)
    v[3, 0, 5] = 1e-9  # alone among its neighbours
    attention.plan([Segment(17, 17, [1, 0])])
    attention.run(1, q, k[:, :2], v[:, :2])
    spans = pool.spans.numpy()
    assert (spans[0] == UNKNOWN).all()
    keys, values = spans[1, 1].reshape(2, 2, 8)
    assert (keys < WIDE).all()
    exponents = k[:16, 0, :8].abs().contiguous().view(torch.int16) >> 8
    assert keys[0, 0] == exponents.min()
    assert values[0, 1] == WIDE  # tokens 2 and 3
    assert (np.delete(values.reshape(-1), 1) < WIDE).all()
    assert (spans[1, 0].reshape(2, 2, 8)[0] == WIDE).all(), "keys of a group that is not full"


@pytest.mark.parametrize("instruction_set", SETS)
def test_blocks_from_elsewhere(instruction_set):
    """A block that was read is given to somebody else, whose numbers a peer writes."""
    shape = Shape(4, 2, 64, 16, "bfloat16")
    pools = pools_of(shape, 3, instruction_set)
    generator = torch.Generator().manual_seed(4)
    managers = {order: BlockManager(3, pool.forget) for order, pool in pools.items()}
    for scale in (1.0, 2.0**-12, 2.0**9):
        contents = scale * torch.randn(pools[PAIRS].tensor.shape, generator=generator)
        q, k, v = numbers("near", (1, 4, 64), generator)
        results = []
        for order, pool in pools.items():
            blocks = managers[order].allocate(3)
            pool.tensor[:] = in_order(contents.bfloat16(), order)
            attention = attention_over(pool, shape, instruction_set)
            attention.plan([Segment(1, 48, blocks)])
            for _ in range(2):
                results.append(attention.run(0, scale * q, k[:, :2] * scale, v[:, :2] * scale))
            managers[order].release(blocks)
        assert all(torch.equal(results[0], each) for each in results[1:])


def test_where_heads_are_no_multiple_of_a_quad_pairs_remain():
    layout = Shape(4, 2, 80, 16, "bfloat16").layout(kernels_for(SETS[0]))
    assert orders_for(layout, kernels_for(SETS[0]))[0] == PAIRS
