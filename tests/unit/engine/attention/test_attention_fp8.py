"""The C++ attention kernel over a pool of e4m3, bit for bit as over what its numbers stand for, on
every CPU's code."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.attention.base import Segment
from engine.attention.cpu_attention import KernelAttention
from engine.device import torch_dtype
from engine.kv_pool import KvPool
from engine.native.library import KernelsUnavailable, load_library
from protocol.layout import FP8, PAIRS, SPLIT
from tests.effort import times
from tests.unit.engine.attention.attention_shapes import NUM_LAYERS, Shape, num_tokens, shapes
from tests.unit.engine.native.instruction_sets import kernels_for, usable_instruction_sets

try:
    load_library()
except KernelsUnavailable as error:
    pytest.skip(f"no kernels here: {error}", allow_module_level=True)

USABLE = usable_instruction_sets()


class RoundedPair:
    """The kernel over e4m3, and over what its numbers stand for in the dtype of the shape."""

    def __init__(
        self, shape: Shape, num_blocks: int, instruction_set: str, split_keys: int
    ) -> None:
        library = kernels_for(instruction_set)
        layout = shape.layout(library)
        if layout.order == SPLIT:
            layout = msgspec.structs.replace(layout, order=PAIRS)
        self.shape, self.dtype = shape, torch_dtype(shape.dtype)
        self.narrow = KvPool(msgspec.structs.replace(layout, dtype=FP8), num_blocks)
        self.wide = KvPool(layout, num_blocks)
        self.narrow.tensor.view(torch.uint8).fill_(0x7F)  # NaN
        self.wide.tensor.fill_(torch.nan)
        self.backends = [
            KernelAttention(pool, shape.windows, shape.num_heads, library, split_keys)
            for pool in (self.narrow, self.wide)
        ]
        self.generator = torch.Generator().manual_seed(6)

    def step(self, segments: list[Segment]) -> int:
        """One batch through both; asserts that results and pools have the same bits.

        Returns how many tokens were compared.
        """
        shape = self.shape
        rows = sum(segment.query_len for segment in segments)
        for backend in self.backends:
            backend.plan(segments)
        for layer in range(NUM_LAYERS):
            q = torch.randn((rows, shape.num_heads, shape.head_dim), generator=self.generator)
            size = (2, rows, shape.num_kv_heads, shape.head_dim)
            kv = torch.randn(size, generator=self.generator)
            kv *= 10.0 ** torch.randint(-3, 3, size, generator=self.generator)
            q, kv = q.to(self.dtype), kv.to(self.dtype)
            narrow, wide = self.backends
            ours = narrow.run(layer, q, *kv)
            assert torch.equal(ours, wide.run(layer, q, *as_fp8(kv).to(self.dtype)))
            assert ours.isfinite().all()
        torch.testing.assert_close(
            self.narrow.tensor.to(self.dtype), self.wide.tensor, rtol=0, atol=0, equal_nan=True
        )
        return rows


def as_fp8(x: torch.Tensor) -> torch.Tensor:
    """The nearest number in e4m3, by torch."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn)


@settings(max_examples=times(15, 60), deadline=None, derandomize=True)
@given(
    shape=shapes,
    texts=st.lists(
        st.tuples(st.integers(0, 200), st.integers(1, 70) | st.just(1)), min_size=1, max_size=4
    ),
    instruction_set=st.sampled_from(USABLE),
    split_keys=st.sampled_from([7, 64, 1024]),
)
@example(Shape(head_dim=64, dtype="bfloat16"), [(100, 1)], USABLE[0], 64)
@example(Shape(head_dim=64), [(100, 1)], USABLE[0], 64)
@example(Shape(head_dim=128, dtype="bfloat16"), [(100, 1), (37, 3)], USABLE[0], 64)
def test_a_pool_of_fp8_is_one_of_what_its_numbers_stand_for(
    shape, texts, instruction_set, split_keys
):
    counts = [-(-(before + now) // shape.block_size) for before, now in texts]
    pair = RoundedPair(shape, sum(counts), instruction_set, split_keys)
    free = torch.randperm(sum(counts), generator=pair.generator).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    parts = list(zip(texts, tables, strict=True))
    before = [Segment(before, before, table) for (before, _), table in parts if before]
    num_before = pair.step(before) if before else 0
    now = [Segment(now, before + now, table) for (before, now), table in parts]
    assert num_before + pair.step(now) == num_tokens(texts)


@pytest.mark.parametrize("instruction_set", USABLE)
def test_every_bf16_number_is_stored_as_torchs_nearest(instruction_set):
    shape = Shape(head_dim=64, num_heads=2, order=2)
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    k = numbers.view(torch.bfloat16).view(-1, shape.num_kv_heads, shape.head_dim)
    blocks = len(k) // shape.block_size
    pair = RoundedPair(shape, blocks, instruction_set, 1024)
    backend = pair.backends[0]
    backend.plan([Segment(len(k), len(k), list(range(blocks)))])
    backend.run(0, torch.zeros_like(k), k, k)
    stored = pair.narrow.tensor[:, 0].view(torch.uint8)  # [blocks, 2, kv heads, block size, dim]
    expected = as_fp8(k).view(torch.uint8).view(blocks, shape.block_size, *k.shape[1:])
    is_nan = k.isnan().view(expected.shape)
    for kind in range(2):
        codes = stored[:, kind].transpose(1, 2)
        assert torch.equal(codes[~is_nan], expected[~is_nan])
        assert ((codes[is_nan] & 0x7F) == 0x7F).all()


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("instruction_set", USABLE)
def test_nan_is_read_as_nan(instruction_set, order):
    shape = Shape(head_dim=64, num_heads=2, order=order)
    pair = RoundedPair(shape, 2, instruction_set, 1024)
    k, v = torch.ones((2, 20, shape.num_kv_heads, shape.head_dim), dtype=torch.bfloat16)
    v[3, :, 5] = torch.nan
    backend = pair.backends[0]
    backend.plan([Segment(20, 20, [1, 0])])
    q = torch.ones((20, shape.num_heads, shape.head_dim), dtype=torch.bfloat16)
    is_nan = backend.run(0, q, k, v).view(20, -1, shape.head_dim).isnan()
    assert is_nan[3:, :, 5].all()
    assert not is_nan[..., [d for d in range(shape.head_dim) if d != 5]].any()
