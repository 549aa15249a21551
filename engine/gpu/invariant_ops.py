"""Launches the kernels of `engine.gpu.invariant_kernels`, with fixed tiles, warps and stages.

Nothing here is tuned while it runs, and no choice that could change a bit depends on the batch.
Only the number of programs that share a sum's parts depends on it. Needs Triton.
"""

from __future__ import annotations

import math

import torch

from engine.attention.invariant_attention import TileCall
from engine.attention.tiles import PART_TOKENS
from engine.gpu import invariant_kernels as kernels
from engine.gpu.ops import ROUNDING

_ROWS, _COLUMNS, _STEP, _PART = 64, 128, 64, 1024
_PRODUCT_LAUNCH = {"num_warps": 4, "num_stages": 3}
_FEW_TILES = 64
"""Products of up to this many tiles get a program for each part of their sums."""
_SUM_BLOCK = 1024
_TOTAL_BLOCK, _TOTAL_WARPS = 4096, 8
_WIDE_HEAD = 256


def attend_tiles(call: TileCall) -> None:
    """See `Attend`; for bf16 and fp16."""
    num_tokens, num_heads, head_dim = call.q.shape
    num_kv_heads, block_size = call.keys.shape[1:3]
    assert call.q.stride()[1:] == (head_dim, 1)
    assert call.out.is_contiguous()
    assert call.keys.stride() == call.values.stride()
    assert call.keys.stride(3) == 1
    if num_tokens == 0:
        return
    sums, totals = call.partials.sums, call.partials.totals
    group = {"GROUP": call.shape.group, "PADDED_GROUP": call.shape.padded_group}
    is_wide = head_dim >= _WIDE_HEAD
    kernels.attend_tiles[(len(call.tiles.items), num_kv_heads)](
        call.q,
        call.out,
        call.keys,
        call.values,
        call.tiles.items,
        call.tiles.segments,
        call.tiles.blocks,
        sums,
        totals,
        call.q.stride(0),
        num_heads,
        call.keys.stride(0),
        call.keys.stride(1),
        call.keys.stride(2),
        math.log2(math.e) * call.scale,
        **group,
        QUERIES=call.shape.num_queries,
        KEYS=32 if is_wide else 64,
        PART=PART_TOKENS,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        WINDOW=call.window or 0,
        num_warps=8 if is_wide else 4,
        num_stages=2,
        **ROUNDING,
    )
    if len(call.tiles.joins):
        kernels.join_parts[(len(call.tiles.joins), num_kv_heads)](
            call.out,
            call.tiles.joins,
            sums,
            totals,
            num_heads,
            **group,
            HEAD_DIM=head_dim,
            num_warps=4,
            **ROUNDING,
        )


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """`out` = `x @ weight.T + bias + add`, rounded once. `x` is [N, inputs], `weight` [outputs,
    inputs], `bias` [outputs]; `add` and `out` are [N, outputs] and may be the same. All are
    contiguous; `x` and `weight` have one dtype, bf16 or fp16."""
    num_rows, inputs = x.shape
    outputs = len(weight)
    for tensor in (x, weight, out, *(each for each in (bias, add) if each is not None)):
        assert tensor.is_contiguous()
    if num_rows == 0:
        return
    num_tiles = -(-num_rows // _ROWS) * -(-outputs // _COLUMNS)
    num_parts = -(-inputs // _PART)
    has_part = num_parts > 1 and num_tiles <= _FEW_TILES
    shape = (num_parts, num_rows, outputs) if has_part else (1,)  # the same kernel either way
    part_sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    ends = (x if bias is None else bias, x if add is None else add)
    kinds = {"HAS_BIAS": bias is not None, "ADDS": add is not None}
    kernels.multiply[(num_tiles, num_parts if has_part else 1)](
        x,
        weight,
        *ends,
        out,
        part_sums,
        num_rows,
        inputs,
        outputs,
        int(has_part),
        **kinds,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        STEP=_STEP,
        PART=_PART,
        **_PRODUCT_LAUNCH,
        **ROUNDING,
    )
    if has_part:
        kernels.sum_parts[(num_rows, -(-outputs // _SUM_BLOCK))](
            part_sums,
            *ends,
            out,
            num_rows,
            outputs,
            num_parts,
            **kinds,
            BLOCK=_SUM_BLOCK,
            num_warps=4,
            **ROUNDING,
        )


def log_totals(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(row))) of each row of `logits` [R, V], fp32, contiguous; returns [R, 1]."""
    assert logits.is_contiguous()
    rows, size = logits.shape
    out = logits.new_empty((rows, 1))
    if rows:
        kernels.log_totals[(rows,)](
            logits, out, size, BLOCK=_TOTAL_BLOCK, num_warps=_TOTAL_WARPS, **ROUNDING
        )
    return out
