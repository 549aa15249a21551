"""The batch-invariant kernels in plain torch, for machines without Triton or a card.

Tiles, parts and joins are taken apart the way the kernels do, with the same operations in the same
order for each row. Products of a row take nothing of other rows.
"""

from __future__ import annotations

import math

import torch

from engine.attention.invariant_attention import TileCall
from engine.attention.tiles import ALL_PARTS, NO_ITEM, PART_TOKENS
from engine.gpu.graphs import Capture
from engine.gpu.invariant_backend import InvariantBackend, InvariantKernels
from engine.kv_pool import KvPool
from engine.layers.ops import TorchOps
from engine.sampling import top_p
from tests.unit.engine.attention.torch_pool_layers import TorchPoolLayers

KEYS = 64
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of each row: its largest score, the total of its weights, the weighted sums."""


def attend_tiles(call: TileCall) -> None:
    """As `engine.gpu.invariant_ops.attend_tiles`."""
    num_heads, num_kv_heads = call.q.shape[1], call.keys.shape[1]
    assert call.out.is_contiguous()
    for array in (call.tiles.items, call.tiles.segments, call.tiles.joins, call.tiles.blocks):
        assert array.dtype == torch.int32
        assert array.is_contiguous()
    for item in call.tiles.items.tolist():
        if item[0] != NO_ITEM:
            for head in range(num_kv_heads):
                _attend(call, item, head)
    for row, first, count in call.tiles.joins.tolist():
        for head in range(num_heads if count else 0):
            state = _empty(1, call.q.shape[2])
            for number in range(first, first + count):
                largest, total = call.partials.totals[number, head, :, None]
                state = _joined(state, (largest, total, call.partials.sums[number, head][None]))
            call.out[row, head] = (state[2] / state[1][:, None])[0].to(call.out.dtype)


def _attend(call: TileCall, item: list[int], head: int) -> None:
    segment, first, part, partial = item
    row, begin, context, table = call.tiles.segments[segment].tolist()
    shape, head_dim, window = call.shape, call.q.shape[2], call.window
    heads = slice(head * shape.group, (head + 1) * shape.group)
    inside = range(max(first, begin), min(first + shape.num_queries, context))
    here = slice(inside.start - first, inside.stop - first)
    rows = slice(row + inside.start - begin, row + inside.stop - begin)
    q = torch.zeros((shape.num_queries, shape.padded_group, head_dim), dtype=call.q.dtype)
    q[here, : shape.group] = call.q[rows, heads]
    positions = first + torch.arange(shape.num_queries).repeat_interleave(shape.padded_group)
    start = 0 if window is None else max(0, inside.start - window + 1)
    end = inside.stop
    parts = range(start // PART_TOKENS, (end - 1) // PART_TOKENS + 1)
    if part != ALL_PARTS:
        assert part in parts
        parts = range(part, part + 1)
    state = _empty(len(positions), head_dim)
    for number in parts:
        found = _empty(len(positions), head_dim)
        first_key = max(number * PART_TOKENS, start // KEYS * KEYS)
        for at in range(first_key, min((number + 1) * PART_TOKENS, end), KEYS):
            places = torch.arange(at, at + KEYS)
            is_key = (places >= start) & (places < end)
            k, v = _rows(call, head, table, places, is_key)
            scores = q.flatten(0, 1).float() @ k.T * (math.log2(math.e) * call.scale)
            seen = is_key & (places <= positions[:, None])
            if window is not None:
                seen &= places > positions[:, None] - window
            found = _added(found, scores.masked_fill(~seen, -math.inf), v)
        state = _joined(state, found)
    largest, total, sums = (
        each.unflatten(0, (shape.num_queries, shape.padded_group))[here, : shape.group]
        for each in state
    )
    if part == ALL_PARTS:
        call.out[rows, heads] = (sums / total[..., None]).to(call.out.dtype)
    else:
        assert len(inside) == 1
        call.partials.sums[partial, heads] = sums[0]
        call.partials.totals[partial, heads] = torch.stack((largest[0], total[0]), dim=-1)


def _rows(
    call: TileCall, head: int, table: int, places: torch.Tensor, is_key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values at `places`, fp32; zeros where they are not to be read."""
    block_size, head_dim = call.keys.shape[2:]
    found = torch.zeros((2, len(places), head_dim))
    read = places[is_key]
    blocks = call.tiles.blocks[table + read // block_size].long()
    for to, cache in zip(found, (call.keys, call.values), strict=True):
        to[is_key] = cache[blocks, head, read % block_size].float()
    return found[0], found[1]


def _empty(rows: int, head_dim: int) -> State:
    return torch.full((rows,), -math.inf), torch.zeros(rows), torch.zeros(rows, head_dim)


def _added(state: State, scores: torch.Tensor, values: torch.Tensor) -> State:
    largest, total, sums = state
    new = torch.maximum(largest, scores.amax(dim=1))
    base = new.masked_fill(new == -math.inf, 0.0)
    weights, keep = torch.exp2(scores - base[:, None]), torch.exp2(largest - base)
    return new, total * keep + weights.sum(dim=1), sums * keep[:, None] + weights @ values


def _joined(state: State, other: State) -> State:
    new = torch.maximum(state[0], other[0])
    base = new.masked_fill(new == -math.inf, 0.0)
    keep, take = torch.exp2(state[0] - base), torch.exp2(other[0] - base)
    total = state[1] * keep + other[1] * take
    return new, total, state[2] * keep[:, None] + other[2] * take[:, None]


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """As `engine.gpu.invariant_ops.multiply`."""
    wide = weight.float()
    for row, inputs in enumerate(x.float()):
        sums = wide @ inputs
        sums = sums if bias is None else sums + bias.float()
        out[row] = (sums if add is None else sums + add[row].float()).to(out.dtype)


def log_totals(logits: torch.Tensor) -> torch.Tensor:
    """As `engine.gpu.invariant_ops.log_totals`."""
    assert logits.is_contiguous()
    return torch.cat([row.logsumexp(0).view(1, 1) for row in logits])


KERNELS = InvariantKernels(attend_tiles, multiply, log_totals, "invariant-stand-in")


class StandIn(InvariantBackend):
    """The backend on a CPU."""

    def ops(self) -> TorchOps:
        """torch's operations, which also compute row by row."""
        return TorchOps(self._config.hidden_act, self._config.rms_norm_eps, self._dtype)

    def find_cut(self) -> top_p.FindCut:
        """torch's search for the cut."""
        return top_p.lowest_kept

    def capture(self) -> Capture:
        """Captures no graph: runs the same pass again."""
        return lambda run: run

    def report(self, pool: KvPool) -> None:
        """Nothing is counted on a CPU."""

    def layers(self, pool: KvPool) -> TorchPoolLayers:
        """Stores by torch."""
        windows, num_heads = self._config.sliding_windows, self._config.num_heads
        return TorchPoolLayers(pool, windows, num_heads, self._dtype)
