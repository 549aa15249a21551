"""Batch-invariant attention: its results, and that a token's bits are the same in every step. By a
stand-in for the kernel in plain torch; and by the kernel itself, on a card or in Triton's
interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.attention import tiles
from engine.attention.base import Segment
from engine.attention.invariant_attention import (
    Attend,
    FixedInvariantDecodes,
    InvariantAttention,
    InvariantBuffers,
    TileCall,
)
from engine.attention.paging import page
from engine.attention.tiles import ALL_PARTS, MAX_PARTIALS, PART_TOKENS, Partials, divide
from engine.kv_pool import KvPool
from protocol.layout import FP8, KvLayout
from tests.unit.engine import fake_invariant_kernels
from tests.unit.engine.attention.torch_pool_layers import TorchPoolLayers

HAS_TRITON = importlib.util.find_spec("triton") is not None and (
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
)
DEVICE = "cuda" if HAS_TRITON and torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 16, 16, 256
ALL_WINDOWS = ((None, None), (70, 600))

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=["stand-in", "triton"])
def attend(request: pytest.FixtureRequest) -> Attend:
    if request.param == "stand-in":
        return fake_invariant_kernels.attend_tiles
    if not HAS_TRITON:
        pytest.skip("needs Triton, and a card or TRITON_INTERPRET=1")
    from engine.gpu.invariant_ops import attend_tiles

    return attend_tiles


class Model:
    """Two layers of attention over one pool, with texts of random q, k and v."""

    def __init__(
        self,
        attend: Attend,
        windows: tuple[int | None, int | None] = (None, None),
        dtype: str = "bfloat16" if DEVICE == "cuda" else "float16",  # else Triton's interpreter
        kv_dtype: str | None = None,
    ) -> None:
        layout = KvLayout(
            model_fingerprint="x",
            dtype=kv_dtype or dtype,
            num_layers=2,
            num_kv_heads=KV_HEADS,
            block_size=BLOCK_SIZE,
            head_dim=HEAD_DIM,
        )
        self.pool = KvPool(layout, NUM_BLOCKS, DEVICE)
        if self.pool.tensor.dtype.itemsize > 1:
            self.pool.tensor.fill_(torch.nan)  # what was not stored must never show
        self.dtype = getattr(torch, dtype)
        self.layers = TorchPoolLayers(self.pool, windows, HEADS, self.dtype)
        self.partials = Partials.empty(HEADS, HEAD_DIM, self.pool.device)
        self.attend = attend
        self.any_batch = InvariantAttention(self.layers, self.partials, attend)

    def store(self, name: str, length: int, first_block: int) -> list[int]:
        """Store the keys and values of a text's tokens; returns its block table."""
        count = -(-length // BLOCK_SIZE)
        table = [(first_block + i) * 5 % NUM_BLOCKS for i in range(count)]  # not in order
        for layer in range(2):
            slots = torch.from_numpy(page([Segment(length, length, table)], BLOCK_SIZE).slots)
            self.layers.store(layer, slots.to(DEVICE), *self.rows(name, layer, length)[1:])
        return table

    def rows(self, name: str, layer: int, length: int) -> tuple[torch.Tensor, ...]:
        """q, k and v of a text's tokens."""
        seed = sum(map(ord, name)) * 2 + layer
        rows = torch.randn(
            (length, HEADS + 2 * KV_HEADS, HEAD_DIM), generator=torch.Generator().manual_seed(seed)
        )
        rows = (2 * rows).to(self.dtype).to(DEVICE)
        return torch.split(rows, [HEADS, KV_HEADS, KV_HEADS], dim=1)

    def run(
        self,
        parts: list[tuple[str, int, int, list[int]]],
        attention: InvariantAttention | None = None,
        padded: int = 0,
    ) -> list[list[torch.Tensor]]:
        """Results [layer][part] of one step; a part is (text, first position, end, table)."""
        attention = attention or self.any_batch
        attention.plan([Segment(end - start, end, table) for _, start, end, table in parts])
        found = []
        for layer in range(2):
            q = torch.cat([self.rows(name, layer, end)[0][start:] for name, start, end, _ in parts])
            missing = torch.zeros((max(0, padded - len(q)), HEADS, HEAD_DIM), dtype=self.dtype)
            q = torch.cat((q, missing.to(DEVICE)))
            out = attention.attend(layer, q)[: len(q) - len(missing)]
            found.append(list(out.split([end - start for _, start, end, _ in parts])))
        return found


def reference(model: Model, name: str, length: int, table: list[int]) -> list[torch.Tensor]:
    """float64, of all tokens in each layer."""
    found = []
    for layer, window in enumerate(model.layers.windows):
        q = model.rows(name, layer, length)[0].double().cpu()
        cache = model.pool.layer(layer)[table].double().cpu()  # [blocks, 2, kv, size, dim]
        k, v = cache.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        at = torch.arange(length)
        seen = at <= at[:, None]
        if window is not None:
            seen &= at > at[:, None] - window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        found.append(torch.einsum("hqk,khd->qhd", weights, v))
    return found


@pytest.mark.parametrize(
    ("windows", "kv_dtype"), [((None, None), None), ((70, 600), None), ((None, 70), FP8)]
)
def test_results_are_those_of_softmax(attend, windows, kv_dtype) -> None:
    model = Model(attend, windows, kv_dtype=kv_dtype)
    length = PART_TOKENS + 190
    table = model.store("a", length, 3)
    expected = reference(model, "a", length, table)
    step = model.run([("a", length - 1, length, table), ("a", length - 75, length, table)])
    for layer in range(2):
        decode, chunk = (each.double().cpu() for each in step[layer])
        torch.testing.assert_close(chunk, expected[layer][-75:], rtol=0.02, atol=0.02)
        torch.testing.assert_close(decode, expected[layer][-1:], rtol=0.02, atol=0.02)
        assert torch.equal(decode, chunk[-1:])


LENGTH = PART_TOKENS + 150


@pytest.mark.parametrize("windows", ALL_WINDOWS)
def test_a_tokens_bits_are_the_same_in_any_chunk_and_any_batch(attend, windows) -> None:
    model = Model(attend, windows)
    table, other = model.store("a", LENGTH, 3), model.store("b", 400, 120)
    first = PART_TOKENS - 70
    alone = model.run([("a", first, LENGTH, table)])
    cuts = [first, first + 1, first + 22, PART_TOKENS + 1, first + 86, LENGTH - 1, LENGTH]
    for start, end in pairwise(cuts):
        chunk = model.run([("a", start, end, table)])
        beside = [("b", 399, 400, other), ("b", 20, 21, other), ("b", 0, 37, other)]
        mixed = model.run([*beside[:2], ("a", start, end, table), beside[2]])
        for layer in range(2):
            expected = alone[layer][0][start - first : end - first]
            assert torch.equal(chunk[layer][0], expected), (start, end)
            assert torch.equal(mixed[layer][2], expected), (start, end)


def test_captured_decodes_give_the_bits_of_other_steps(attend) -> None:
    model = Model(attend, (None, 70))
    table, other = model.store("a", LENGTH, 3), model.store("b", 400, 120)
    buffers = InvariantBuffers(model.layers, 3, 3 * NUM_BLOCKS)
    expected = model.run([("a", LENGTH - 9, LENGTH, table)])
    for size in (1, 3):
        captured = FixedInvariantDecodes(model.layers, size, buffers, model.partials, attend)
        decodes = [("a", LENGTH - 4, LENGTH - 3, table), ("b", 30, 31, other)][:size]
        for parts in (decodes, decodes[::-1], decodes[:1]):
            found = model.run(parts, captured, padded=size)
            at = parts.index(decodes[0]) if decodes[0] in parts else None
            for layer in range(2):
                if at is not None:
                    assert torch.equal(found[layer][at], expected[layer][0][5:6])


def test_parts_may_be_computed_by_one_program_or_by_several(attend, monkeypatch) -> None:
    model = Model(attend, (None, 600))
    length = 2 * PART_TOKENS + 5
    table = model.store("a", length, 3)
    part = ("a", length - 1, length, table)
    apart = model.run([part])
    monkeypatch.setattr(tiles, "MAX_PARTIALS", 1)
    together = model.run([part])
    for layer in range(2):
        assert torch.equal(apart[layer][0], together[layer][0])


def test_a_kernel_that_divides_by_the_batch_is_found_out() -> None:
    """The tests above can fail."""

    def by_batch(call: TileCall) -> None:
        """Smaller tiles of keys where the step has more than one segment."""
        with pytest.MonkeyPatch.context() as patch:
            keys = fake_invariant_kernels.KEYS // len(call.tiles.segments)
            patch.setattr(fake_invariant_kernels, "KEYS", keys)
            fake_invariant_kernels.attend_tiles(call)

    with pytest.raises(AssertionError, match="equal"):
        test_a_tokens_bits_are_the_same_in_any_chunk_and_any_batch(by_batch, (None, None))


# Planning


def batches() -> Iterator[tuple[list[Segment], int | None]]:
    """Random steps, from few short contexts to more parts than there are partials."""
    generator = np.random.default_rng(0)
    for count, longest in ((1, 40), (1, 5000), (7, 900), (40, 3000), (90, 9000), (130, 4000)):
        for window in (None, 70, 1500):
            segments = []
            for _ in range(count):
                context = int(generator.integers(1, longest))
                length = int(generator.integers(1, context + 1)) if generator.random() < 0.2 else 1
                segments.append(Segment(length, context, [0] * -(-context // BLOCK_SIZE)))
            yield segments, window


def test_every_token_is_computed_once_whole_or_in_all_its_parts() -> None:
    num_queries, num_divided = 16, 0
    for segments, window in batches():
        work = divide(page(segments, BLOCK_SIZE), BLOCK_SIZE, num_queries, window)
        computed: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for segment, first, part, partial in work.items.tolist():
            assert first % num_queries == 0
            end = segments[segment].context_len
            start = end - segments[segment].query_len
            inside = range(max(first, start), min(first + num_queries, end))
            assert len(inside) > 0
            for position in inside:
                computed.setdefault((segment, position), []).append((part, partial))
        joined = {row: (first, count) for row, first, count in work.joins.tolist()}
        assert sum(count for _, count in joined.values()) <= MAX_PARTIALS
        for index, (row, start, context, _) in enumerate(work.segments.tolist()):
            assert context == segments[index].context_len
            for position in range(start, context):
                found = computed.pop((index, position))
                first_key = 0 if window is None else max(0, position - window + 1)
                parts = range(first_key // PART_TOKENS, position // PART_TOKENS + 1)
                if row in joined:
                    first, count = joined[row]
                    num_divided += 1
                    assert found == [(part, first + i) for i, part in enumerate(parts)]
                    assert count == len(parts) > 1
                else:
                    assert found == [(ALL_PARTS, 0)]
        assert not computed
    assert num_divided > 100


def test_captured_steps_have_room_for_all_items() -> None:
    for segments, window in batches():
        decodes = [Segment(1, each.context_len, each.block_table) for each in segments]
        longest = max(each.context_len for each in decodes)
        work = divide(page(decodes, BLOCK_SIZE), BLOCK_SIZE, 16, window)
        assert len(work.items) <= tiles.most_items(len(decodes), longest)
        assert len(tiles.pad(work, tiles.most_items(len(decodes), longest), len(decodes)).items)
