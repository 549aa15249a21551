"""Triton kernels for the operations between a layer's matrix products and attention.

Each kernel reads its input once, computes in fp32 and rounds once. `engine.gpu.ops` launches the
kernels, which know nothing of models. Importing this module needs Triton, but no card: for tests,
the kernels run (slowly) on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(x, weight, out, size, eps, BLOCK: tl.constexpr):
    """Each program norms one row [size] of `x`: out = x / sqrt(mean(x^2) + eps) * weight."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    wide = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / size + eps)
    scaled = wide * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scale_rows(x, values, scales, size, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """Each program scales one row [size] of `x`: values = x / scale, the largest being LIMIT.

    A value that is not finite makes the scale NaN, because the maximum and the 8-bit format may
    hide such a value.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    wide = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), axis=0), 1e-12) / LIMIT + tl.sum(wide * 0.0, axis=0)
    bounded = tl.minimum(tl.maximum(wide / scale, -LIMIT), LIMIT)
    tl.store(values + row * size + columns, bounded.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def silu_gate(gate_up, out, size, BLOCK: tl.constexpr):
    """Each program computes a block of one row [2 * size]: out = silu(first half) * second half."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + columns, gated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_and_store(  # noqa: PLR0913, PLR0915 - a kernel
    heads,  # [N, num_q + 2 * num_kv, 2 * HALF], q's heads, then k's, then v's
    weight,  # [num_q + num_kv, 2 * HALF]: the norms of q and k; unused without NORMED
    cos,  # [N, HALF] fp32; unused without ROTATED
    sin,
    slots,  # [N] int64, negative: store nothing
    keys,  # the address of block 0 in one layer
    values,
    block_stride,  # elements
    head_stride,
    token_stride,
    num_q,
    num_kv,
    block_size,
    eps,
    k_scale,
    v_scale,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
    LIMIT: tl.constexpr,  # the largest value of the pool's dtype; 0: no need to clamp
):
    """Each program handles one head of one token: rotates q in place, or stores the rotated k or
    the v in its slot.

    The stored values are k / k_scale and v / v_scale.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, HALF)
    source = heads + (token * (num_q + 2 * num_kv) + head) * 2 * HALF
    first = tl.load(source + columns).to(tl.float32)
    second = tl.load(source + HALF + columns).to(tl.float32)
    turned = head < num_q + num_kv
    if turned:
        if NORMED:
            total = tl.sum(first * first + second * second, axis=0)
            scale = 1.0 / tl.sqrt(total / (2 * HALF) + eps)
            first *= scale * tl.load(weight + head * 2 * HALF + columns).to(tl.float32)
            second *= scale * tl.load(weight + head * 2 * HALF + HALF + columns).to(tl.float32)
        if ROTATED:
            c = tl.load(cos + token * HALF + columns)
            s = tl.load(sin + token * HALF + columns)
            rotated = first * c - second * s
            second = second * c + first * s
            first = rotated
    if head < num_q:
        if NORMED or ROTATED:
            tl.store(source + columns, first.to(heads.dtype.element_ty))
            tl.store(source + HALF + columns, second.to(heads.dtype.element_ty))
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            place = slot // block_size * block_stride + slot % block_size * token_stride
            if turned:
                target = keys + place + (head - num_q) * head_stride
                first /= k_scale
                second /= k_scale
            else:
                target = values + place + (head - num_q - num_kv) * head_stride
                first /= v_scale
                second /= v_scale
            if LIMIT > 0:
                first = tl.minimum(tl.maximum(first, -LIMIT), LIMIT)
                second = tl.minimum(tl.maximum(second, -LIMIT), LIMIT)
            tl.store(target + columns, first.to(keys.dtype.element_ty))
            tl.store(target + HALF + columns, second.to(keys.dtype.element_ty))


@triton.jit
def lowest_kept(scaled, weights, needed, out, size, BLOCK: tl.constexpr):
    """Each program finds the cut of top-p in one row [size] of `scaled`: the largest value at which
    the `weights` (int64) of it and of all larger values sum to `needed` (fp64) or more.

    Values' bits, in ascending order as unsigned numbers, are searched four at a time: eight passes
    over the row, each of which sums the weights above 16 candidates. NaN if no value is enough.
    """
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(needed + row)
    digits = tl.arange(0, 16).to(tl.int64)
    found = tl.zeros((), dtype=tl.int64)
    for step in tl.static_range(8):
        candidates = found | (digits << (28 - 4 * step))
        sums = tl.zeros((16,), dtype=tl.int64)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < size
            value = tl.load(scaled + row * size + columns, mask=inside, other=0.0)
            weight = tl.load(weights + row * size + columns, mask=inside, other=0)
            bits = value.to(tl.int32, bitcast=True)
            keys = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.int64) & 0xFFFFFFFF
            is_above = keys[None, :] >= candidates[:, None]
            sums += tl.sum(tl.where(is_above, weight[None, :], 0), axis=1)
        enough = sums.to(tl.float64) >= wanted
        found = tl.max(tl.where(enough, candidates, found), axis=0)
    is_positive = found >> 31 == 1
    bits = tl.where(is_positive, found ^ 0x80000000, found ^ 0xFFFFFFFF)
    tl.store(out + row, bits.to(tl.uint32).to(tl.float32, bitcast=True))
