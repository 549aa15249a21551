"""A prompt's attention is the same, bit for bit, in whatever pieces its tokens come.

So a sequence that another worker takes over, or one that was preempted, goes on with the tokens
that it would have had: what was decoded token by token comes back as a prompt. (Contexts beyond
`split_keys` are summed in pieces for few queries only, and tiles of a window begin with its first
query's.)
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.attention.base import Segment
from engine.attention.cpu_attention import KernelAttention, orders_for
from engine.kv_pool import KvPool
from engine.native.library import KernelsUnavailable, load_library
from protocol.layout import FP8, KvLayout
from tests.effort import times
from tests.unit.engine.native.instruction_sets import kernels_for, usable_instruction_sets

try:
    load_library()
except KernelsUnavailable as error:
    pytest.skip(f"no kernels here: {error}", allow_module_level=True)

LENGTH = 150
BEST = usable_instruction_sets()[0]
TINY = 2.0**-125
"""Of values of this size some are too small to be normal."""


def attend(
    qkv: torch.Tensor,
    heads: tuple[int, int],
    pieces: list[int],
    layout: KvLayout,
    instruction_set: str,
) -> torch.Tensor:
    """Attention of `qkv` [tokens, heads, head_dim], whose tokens come in pieces this long."""
    library = kernels_for(instruction_set)
    num_blocks = -(-len(qkv) // layout.block_size)
    pool = KvPool(layout, num_blocks)
    attention = KernelAttention(pool, [None], heads[0], library)
    table, done, outs = list(range(num_blocks))[::-1], 0, []
    for count in pieces:
        attention.plan([Segment(count, done + count, table)])
        q, k, v = qkv[done : done + count].split([heads[0], heads[1], heads[1]], dim=1)
        outs.append(attention.run(0, q, k, v))
        done += count
    assert done == len(qkv)
    return torch.cat(outs)


@settings(max_examples=times(25, 60), deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([(4, 4), (12, 4), (14, 2), (17, 1), (32, 2)]),
    head_dim=st.sampled_from([16, 40, 64, 80, 128]),
    order=st.sampled_from([0, 1, 2]),
    values=st.sampled_from([("bfloat16", 1.0), ("bfloat16", TINY), (FP8, 1.0)]),
    instruction_set=st.sampled_from(usable_instruction_sets()),
    cuts=st.sets(st.integers(1, LENGTH - 1), max_size=12),
)
@example((12, 4), 64, 0, ("bfloat16", 1.0), BEST, set(range(1, LENGTH)))
@example((12, 4), 64, 0, ("bfloat16", TINY), BEST, set(range(1, LENGTH)))
@example((16, 8), 128, 0, (FP8, 1.0), BEST, set(range(1, LENGTH)))
def test_pieces_change_no_bit(heads, head_dim, order, values, instruction_set, cuts):
    """`values` are of what dtype, and how large."""
    dtype, scale = values
    layout = KvLayout(
        model_fingerprint="x",
        dtype=dtype,
        num_layers=1,
        num_kv_heads=heads[1],
        block_size=16,
        head_dim=head_dim,
    )
    orders = orders_for(layout, kernels_for(instruction_set))
    layout = msgspec.structs.replace(layout, order=orders[min(order, len(orders) - 1)])
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn((LENGTH, heads[0] + 2 * heads[1], head_dim), generator=generator)
    qkv[:, heads[0] + heads[1] :] *= scale
    qkv = qkv.to(torch.bfloat16)
    ends = [*sorted(cuts), LENGTH]
    pieces = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    whole, cut = (
        attend(qkv, heads, lengths, layout, instruction_set) for lengths in ([LENGTH], pieces)
    )
    assert torch.equal(whole, cut)
