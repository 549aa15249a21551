"""Triton kernels whose results for a row do not depend on the other rows: attention, products, and
the totals of log-probabilities.

Shapes of tiles are fixed, and sums have one order. A long sum is divided into parts of fixed size;
each part is summed from zero, and the parts are added in order. One program may compute all parts
of a tile, or several programs one each, in the same compiled kernel: this changes no bit, as the
operations are the same. Numbers that change from step to step are not specialized on, since that
would compile another kernel for some batches.

Written for tensor cores, with sums in fp32. `engine.gpu.invariant_ops` launches the kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _joined(largest, total, sums, other_largest, other_total, other_sums):
    """Joins two softmax-weighted sums. Each has, for each row, the largest score (base 2), the
    total of the weights, and the weighted sums. A row without any weight changes no bit of the
    other."""
    new = tl.maximum(largest, other_largest)
    base = tl.where(new == float("-inf"), 0.0, new)
    keep, take = tl.exp2(largest - base), tl.exp2(other_largest - base)
    total = total * keep + other_total * take
    sums = sums * keep[:, None] + other_sums * take[:, None]
    return new, total, sums


@triton.jit
def attend_tiles(  # noqa: PLR0913, PLR0915 - a kernel
    q,
    out,
    keys,  # the address of block 0 in one layer
    values,
    items,  # as in engine.attention.tiles
    segments,
    blocks,
    part_sums,  # [MAX_PARTIALS, num_heads, HEAD_DIM] fp32
    part_totals,  # [MAX_PARTIALS, num_heads, 2] fp32
    q_stride,  # of tokens, in elements
    num_heads,
    block_stride,
    head_stride,
    token_stride,
    scale,  # of scores, times log2(e)
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
):
    """Each program computes one item for one KV head: a tile, or one part of a tile's keys."""
    item = items + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    segment = tl.load(item)
    if segment >= 0:
        first = tl.load(item + 1)
        part = tl.load(item + 2)
        begin = tl.load(segments + segment * 4 + 1)
        context = tl.load(segments + segment * 4 + 2)
        table = blocks + tl.load(segments + segment * 4 + 3)
        rows = tl.arange(0, QUERIES * PADDED_GROUP)
        member = rows % PADDED_GROUP
        positions = first + rows // PADDED_GROUP
        is_row = (positions >= begin) & (positions < context) & (member < GROUP)
        token = (tl.load(segments + segment * 4) + positions - begin).to(tl.int64)
        head = kv_head * GROUP + member
        dims = tl.arange(0, HEAD_DIM)
        from_q = q + token * q_stride + head * HEAD_DIM
        query = tl.load(from_q[:, None] + dims[None, :], mask=is_row[:, None], other=0.0)

        end = tl.minimum(first + QUERIES, context)
        start = 0
        if WINDOW > 0:
            start = tl.maximum(0, tl.maximum(first, begin) - WINDOW + 1)
        first_part = start // PART
        end_part = (end - 1) // PART + 1
        if part >= 0:
            first_part = part
            end_part = part + 1
        largest = tl.full((QUERIES * PADDED_GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES * PADDED_GROUP,), tl.float32)
        sums = tl.zeros((QUERIES * PADDED_GROUP, HEAD_DIM), tl.float32)
        for number in range(first_part, end_part):
            part_largest = tl.full((QUERIES * PADDED_GROUP,), float("-inf"), tl.float32)
            part_total = tl.zeros((QUERIES * PADDED_GROUP,), tl.float32)
            part_sum = tl.zeros((QUERIES * PADDED_GROUP, HEAD_DIM), tl.float32)
            first_key = tl.maximum(number * PART, start // KEYS * KEYS)
            end_key = tl.minimum((number + 1) * PART, end)
            for at in range(first_key, end_key, KEYS):
                places = at + tl.arange(0, KEYS)
                is_key = (places >= start) & (
                    places < end
                )  # values beyond the context are arbitrary
                block = tl.load(table + places // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
                where = block * block_stride + kv_head * head_stride
                where += places % BLOCK_SIZE * token_stride
                at_keys = keys + where[None, :] + dims[:, None]
                key = tl.load(at_keys, mask=is_key[None, :], other=0.0).to(query.dtype)
                scores = tl.dot(query, key) * scale
                is_seen = is_key[None, :] & (places[None, :] <= positions[:, None])
                if WINDOW > 0:
                    is_seen = is_seen & (places[None, :] > positions[:, None] - WINDOW)
                scores = tl.where(is_seen, scores, float("-inf"))
                new = tl.maximum(part_largest, tl.max(scores, axis=1))
                base = tl.where(new == float("-inf"), 0.0, new)
                weights = tl.exp2(scores - base[:, None])
                keep = tl.exp2(part_largest - base)
                part_total = part_total * keep + tl.sum(weights, axis=1)
                part_sum = part_sum * keep[:, None]
                at_values = values + where[:, None] + dims[None, :]
                value = tl.load(at_values, mask=is_key[:, None], other=0.0).to(query.dtype)
                part_sum = tl.dot(weights.to(query.dtype), value, part_sum)
                part_largest = new
            largest, total, sums = _joined(largest, total, sums, part_largest, part_total, part_sum)

        if part >= 0:
            to = tl.load(item + 3).to(tl.int64) * num_heads + head
            to_sums = part_sums + to[:, None] * HEAD_DIM + dims[None, :]
            tl.store(to_sums, sums, mask=is_row[:, None])
            tl.store(part_totals + to * 2, largest, mask=is_row)
            tl.store(part_totals + to * 2 + 1, total, mask=is_row)
        else:
            to_out = out + (token * num_heads + head)[:, None] * HEAD_DIM + dims[None, :]
            result = sums / tl.where(total == 0.0, 1.0, total)[:, None]  # padding has no weights
            tl.store(to_out, result.to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def join_parts(  # noqa: PLR0913 - a kernel
    out,
    joins,
    part_sums,
    part_totals,
    num_heads,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Each program joins the parts of one token, for the heads of one KV head, in order."""
    join = joins + tl.program_id(0) * 3
    token = tl.load(join).to(tl.int64)
    first = tl.load(join + 1).to(tl.int64)
    count = tl.load(join + 2)
    if count > 0:
        member = tl.arange(0, PADDED_GROUP)
        is_head = member < GROUP
        head = tl.program_id(1) * GROUP + member
        dims = tl.arange(0, HEAD_DIM)
        largest = tl.full((PADDED_GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((PADDED_GROUP,), tl.float32)
        sums = tl.zeros((PADDED_GROUP, HEAD_DIM), tl.float32)
        for number in range(count):
            at = (first + number) * num_heads + head
            other_largest = tl.load(part_totals + at * 2, mask=is_head, other=float("-inf"))
            other_total = tl.load(part_totals + at * 2 + 1, mask=is_head, other=0.0)
            at_sums = part_sums + at[:, None] * HEAD_DIM + dims[None, :]
            other_sums = tl.load(at_sums, mask=is_head[:, None], other=0.0)
            largest, total, sums = _joined(
                largest, total, sums, other_largest, other_total, other_sums
            )
        to = out + (token * num_heads + head)[:, None] * HEAD_DIM + dims[None, :]
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]  # padding has no weights
        tl.store(to, result.to(out.dtype.element_ty), mask=is_head[:, None])


@triton.jit(do_not_specialize=["num_rows", "has_part"])
def multiply(  # noqa: PLR0913 - a kernel
    x,  # [num_rows, inputs]
    weight,  # [outputs, inputs]
    bias,  # [outputs]; unused without HAS_BIAS
    add,  # [num_rows, outputs]; unused without ADDS
    out,  # [num_rows, outputs]; may be `add`
    part_sums,  # [number of parts, num_rows, outputs] fp32
    num_rows,
    inputs,
    outputs,
    has_part,  # whether each program computes one part, and leaves the rest to `sum_parts`
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PART: tl.constexpr,
):
    """Each program computes a tile of `x @ weight.T + bias + add`, or one part of its sums."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    rows = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < outputs
    from_x = x + rows.to(tl.int64)[:, None] * inputs
    from_weight = weight + columns.to(tl.int64)[None, :] * inputs
    first_part = 0
    end_part = tl.cdiv(inputs, PART)
    if has_part > 0:
        first_part = tl.program_id(1)
        end_part = first_part + 1
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(first_part, end_part):
        part_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(number * PART, tl.minimum((number + 1) * PART, inputs), STEP):
            depth = at + tl.arange(0, STEP)
            is_inside = depth < inputs
            left_mask = is_row[:, None] & is_inside[None, :]
            right_mask = is_inside[:, None] & is_column[None, :]
            left = tl.load(from_x + depth[None, :], mask=left_mask, other=0.0)
            right = tl.load(from_weight + depth[:, None], mask=right_mask, other=0.0)
            part_sum = tl.dot(left, right, part_sum)
        sums += part_sum

    is_inside = is_row[:, None] & is_column[None, :]
    to = rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    if has_part > 0:
        to_part = tl.program_id(1).to(tl.int64) * num_rows * outputs
        tl.store(part_sums + to_part + to, sums, mask=is_inside)
    else:
        if HAS_BIAS:
            sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if ADDS:
            sums += tl.load(add + to, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(out + to, sums.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def sum_parts(  # noqa: PLR0913 - a kernel
    part_sums,
    bias,
    add,
    out,
    num_rows,
    outputs,
    num_parts,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program adds the parts of a block of one row, in order, as `multiply` does."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < outputs
    sums = tl.zeros((BLOCK,), tl.float32)
    for number in range(num_parts):
        at = (number * num_rows + row) * outputs + columns
        sums += tl.load(part_sums + at, mask=is_inside, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_inside, other=0.0).to(tl.float32)
    if ADDS:
        sums += tl.load(add + row * outputs + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + columns, sums.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def log_totals(logits, out, size, BLOCK: tl.constexpr):
    """Each program computes log(sum(exp(logits))) of one row [size], block by block."""
    row = logits + tl.program_id(0).to(tl.int64) * size
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(row + columns, mask=columns < size, other=float("-inf"))
        largest = tl.maximum(largest, values)
    base = tl.max(largest, axis=0)
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(row + columns, mask=columns < size, other=float("-inf"))
        totals += tl.exp(values - base)
    tl.store(out + tl.program_id(0), base + tl.log(tl.sum(totals, axis=0)))
