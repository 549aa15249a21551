"""The C++ attention kernel against the torch backend, over hostile pools, on every CPU's code."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.attention.base import Segment
from engine.attention.cpu_attention import KernelAttention, supports
from engine.attention.torch_attention import TorchAttention
from engine.checkpoint.attention_config import Scoring
from engine.kv_pool import KvPool
from engine.native.library import (
    KernelsUnavailable,
    load_library,
)
from protocol.layout import FP8, TOKENS
from tests.effort import pairwise, times
from tests.unit.engine.attention.attention_shapes import (
    NUM_LAYERS,
    Shape,
    in_order,
    num_tokens,
    shapes,
)
from tests.unit.engine.native.instruction_sets import (
    instruction_sets_with_products,
    kernels_for,
    usable_instruction_sets,
)

try:
    load_library()
except KernelsUnavailable as error:
    pytest.skip(f"no kernels here: {error}", allow_module_level=True)

USABLE = usable_instruction_sets()

TOLERANCE = {"float32": 2e-5, "bfloat16": 0.02}


class Pair:
    """The kernel and the torch backend over twin pools, filled alike."""

    def __init__(
        self, shape: Shape, num_blocks: int, instruction_set: str, split_keys: int, garbage: float
    ) -> None:
        self.shape = shape
        library = kernels_for(instruction_set)
        layout = shape.layout(library)
        plain = msgspec.structs.replace(layout, order=TOKENS, peer_stages=0)
        self.pools = [KvPool(each, num_blocks) for each in (layout, plain)]
        for pool in self.pools:
            for layer in map(pool.layer, range(NUM_LAYERS)):
                layer.copy_(in_order(torch.full_like(layer, garbage), pool.layout.order))
        windows, scoring = shape.windows, shape.scoring
        self.backends = [
            KernelAttention(
                self.pools[0], windows, shape.num_heads, library, split_keys, scoring=scoring
            ),
            TorchAttention(self.pools[1], windows, scoring=scoring),
        ]
        self.generator = torch.Generator().manual_seed(5)
        self.last_key = 1.0
        """How long a step's last key is; they grow from 1."""

    def step(self, segments: list[Segment]) -> int:
        """One batch through both, with new q, k and v; asserts that they agree.

        Returns how many tokens were compared.
        """
        shape = self.shape
        rows = sum(segment.query_len for segment in segments)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        for backend in self.backends:
            backend.plan(segments)
        for layer in range(NUM_LAYERS):
            qkv = torch.randn((rows, heads, shape.head_dim), generator=self.generator)
            q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
            k *= torch.linspace(1, self.last_key, rows)[:, None, None]
            q, k, v = (x.to(self.pools[0].tensor.dtype) for x in (q, k, v))
            sinks = torch.randn(shape.num_heads, generator=self.generator) * 3
            sinks = sinks if shape.has_sinks else None
            ours, expected = (backend.run(layer, q, k, v, sinks) for backend in self.backends)
            assert ours.shape == expected.shape
            assert ours.dtype == expected.dtype
            tolerance = TOLERANCE[shape.dtype]
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
        ours, expected = self.pools
        for layer in range(NUM_LAYERS):
            wanted = in_order(expected.layer(layer), ours.layout.order).contiguous()
            found = ours.layer(layer).contiguous()
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        return rows


def run_texts(
    shape: Shape,
    texts: list[tuple[int, int]],
    instruction_set: str,
    split_keys: int = 64,
    garbage: float = float("nan"),
) -> int:
    """Texts of (tokens before, tokens now) whose blocks are dealt out at random; how many tokens of
    them both computed alike."""
    counts = [-(-(before + now) // shape.block_size) for before, now in texts]
    pair = Pair(shape, sum(counts) + 3, instruction_set, split_keys, garbage)
    free = torch.randperm(sum(counts) + 3, generator=pair.generator).tolist()
    tables = [[free.pop() for _ in range(count)] + [10**6] for count in counts]
    before = [
        Segment(before, before, table)
        for (before, _), table in zip(texts, tables, strict=True)
        if before
    ]
    num_before = pair.step(before) if before else 0
    return num_before + pair.step(
        [Segment(now, before + now, t) for (before, now), t in zip(texts, tables, strict=True)]
    )


@settings(max_examples=times(15, 120), deadline=None, derandomize=True)
@given(
    shape=shapes,
    texts=st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 150) | st.just(1)), min_size=1, max_size=6
    ),
    instruction_set=st.sampled_from(USABLE),
    split_keys=st.sampled_from([7, 64, 1024]),
)
@example(Shape(head_dim=64, dtype="bfloat16"), [(0, 1)], USABLE[0], 64)
def test_any_batch_equals_torchs(shape, texts, instruction_set, split_keys):
    assert run_texts(shape, texts, instruction_set, split_keys) == num_tokens(texts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("order", [0, 2])
@pytest.mark.parametrize("instruction_set", USABLE)
@pytest.mark.parametrize("told", [{"scoring": Scoring(0.4, 3.0)}, {"has_sinks": True}])
def test_scores_that_are_capped_and_sinks(dtype, order, instruction_set, told):
    """By units of one row, of few and of many, whole and in parts."""
    texts = [(200, 1), (0, 90), (130, 3), (40, 1)]
    for heads in ((6, 2), (2, 2), (12, 1)):
        shape = Shape(*heads, 64, dtype=dtype, windows=(None, 50), order=order, **told)
        assert run_texts(shape, texts, instruction_set) == num_tokens(texts)


few_rows = st.builds(
    lambda heads, **rest: Shape(heads[0] * heads[1], heads[1], dtype="bfloat16", **rest),
    st.tuples(st.integers(1, 17), st.sampled_from([1, 2, 3, 8, 33])),
    head_dim=st.sampled_from([16, 64, 80, 128, 160, 256]),
    block_size=st.sampled_from([16, 32, 64]),
    windows=st.sampled_from([(None, None), (1, 37), (100, None)]),
)


@settings(max_examples=times(8, 120), deadline=None, derandomize=True)
@given(
    shape=few_rows,
    texts=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 16)), min_size=1, max_size=4),
    instruction_set=st.sampled_from(instruction_sets_with_products() or USABLE[:1]),
    split_keys=st.sampled_from([7, 64, 1024]),
)
@example(  # sixteen rows begin with a query that sees a whole tile, and have one that does not
    Shape(16, 16, 64, dtype="bfloat16"), [(62, 5)] * 8, USABLE[0], 64
)
def test_few_queries_over_pairs(shape, texts, instruction_set, split_keys):
    """As decode has them: some tokens of each text, a few heads that share keys."""
    most = max(1, 16 // (shape.num_heads // shape.num_kv_heads))
    texts = [(before, min(now, most)) for before, now in texts]
    assert run_texts(shape, texts, instruction_set, split_keys) == num_tokens(texts)


@pytest.mark.parametrize("instruction_set", USABLE)
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float32", 16), ("bfloat16", 16), ("bfloat16", 128)]
)
def test_largest_scores_that_come_late(instruction_set, dtype, head_dim):
    """Of a prompt in two pieces and of single tokens: weights far above all before them."""
    shape = Shape(dtype=dtype, head_dim=head_dim)
    pair = Pair(shape, 40, instruction_set, 1024, float("nan"))
    pair.last_key = 8.0
    table = list(range(40))
    steps = [(300, 300), (200, 500), *((1, context) for context in range(501, 505))]
    assert sum(pair.step([Segment(*step, table)]) for step in steps) == 504


@pytest.mark.parametrize("garbage", [float("inf"), float("-inf"), 3e38])
@pytest.mark.parametrize("instruction_set", USABLE)
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float32", 16), ("bfloat16", 16), ("bfloat16", 128)]
)
def test_garbage_beyond_the_context_never_shows(garbage, instruction_set, dtype, head_dim):
    shape = Shape(dtype=dtype, head_dim=head_dim, windows=(3, None))
    for texts in ([(n, 1) for n in (0, 1, 15, 16, 63, 64, 65)], [(0, 5), (70, 40)]):
        assert run_texts(shape, texts, instruction_set, 64, garbage) == num_tokens(texts)


@settings(max_examples=times(2, 6), deadline=None, derandomize=True)
@given(
    length=st.integers(2_000, 16_384),
    last=st.sampled_from([1, 3, 30]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    window=st.sampled_from([None, 4_096]),
    head_dim=st.sampled_from([16, 128]),
)
@example(16_383, 1, "float32", None, 16)
@example(16_383, 1, "bfloat16", None, 16)
@example(16_383, 1, "bfloat16", None, 128)
def test_long_contexts(length, last, dtype, window, head_dim):
    """A long text lies in the pool from elsewhere; its last tokens run beside a short one."""
    shape = Shape(dtype=dtype, windows=(window, None), head_dim=head_dim)
    count = -(-(length + last) // shape.block_size)
    pair = Pair(shape, count + 8, USABLE[0], 1024, 0.0)
    for pool in pair.pools:
        generator = torch.Generator().manual_seed(1)
        numbers = torch.randn(pool.tensor.shape, generator=generator).to(pool.tensor.dtype)
        pool.tensor.copy_(in_order(numbers, pool.layout.order))
    table = torch.randperm(count, generator=pair.generator).tolist()
    assert pair.step([Segment(last, length + last, table), Segment(1, 3, [count + 1])]) == last + 1


@pairwise("head_dim, threads, order", [64, 128], [1, 2, 3], [0, 1, 2])
def test_neither_batch_nor_threads_change_a_row(threads, head_dim, order):
    shape = Shape(dtype="bfloat16", head_dim=head_dim, order=order)
    pool = KvPool(shape.layout(load_library()), 400)
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randn(pool.tensor.shape, generator=generator).bfloat16()
    pool.tensor.copy_(in_order(numbers, pool.layout.order))
    attention = KernelAttention(
        pool, shape.windows, shape.num_heads, load_library(), split_keys=256
    )
    tables = [torch.randperm(100, generator=generator) + 100 * i for i in range(4)]
    segments = [Segment(1, n, t.tolist()) for n, t in zip((1, 700, 1500, 33), tables, strict=True)]
    q = torch.randn((4, 4, head_dim), generator=generator).bfloat16()
    k, v = torch.randn((2, 4, 2, head_dim), generator=generator).bfloat16()
    attention.plan(segments)
    together = attention.run(0, q, k, v)
    torch.set_num_threads(threads)
    for row, segment in enumerate(segments):
        attention.plan([segment])
        one = slice(row, row + 1)
        assert torch.equal(attention.run(0, q[one], k[one], v[one]), together[one])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_prompt_is_the_same_in_large_and_small_units(head_dim, order):
    """Many threads get more, and smaller, units of a prompt."""
    shape = Shape(dtype="bfloat16", head_dim=head_dim, order=order)
    generator = torch.Generator().manual_seed(3)
    pool = KvPool(shape.layout(load_library()), 40)
    numbers = torch.randn(pool.tensor.shape, generator=generator).bfloat16()
    pool.tensor.copy_(in_order(numbers, pool.layout.order))
    attention = KernelAttention(pool, shape.windows, shape.num_heads, load_library())
    q = torch.randn((300, 4, head_dim), generator=generator).bfloat16()
    k, v = torch.randn((2, 300, 2, head_dim), generator=generator).bfloat16()
    results, units = [], []
    for threads in (1, 16):
        torch.set_num_threads(threads)
        attention.plan([Segment(300, 377, list(range(24)))])
        units.append(attention.planned(None).num_units)
        results.append(attention.run(0, q, k, v))
    assert units == [6, 10]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "can"),
    [
        ("float32", 8, True),
        ("bfloat16", 2, True),
        (FP8, 8, True),
        ("float16", 8, False),
        ("bfloat16", 9, False),
    ],
)
def test_what_the_kernel_cannot_do_is_said(dtype, head_dim, can):
    assert supports(dtype, head_dim) is can


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_values_that_left_the_window_never_show(queries, order):
    """Infinite ones, beside those that are seen, for few rows of a head and for many."""
    shape = Shape(dtype="bfloat16", head_dim=64, windows=(20, 20), order=order)
    pair = Pair(shape, 6, USABLE[0], 1024, float("nan"))
    table = list(range(6))
    pair.step([Segment(89, 89, table)])
    ours, plain = (pool.tensor for pool in pair.pools)
    plain[4, :, 1, :, :3] = torch.inf  # tokens 64 to 66; from 70 on they are seen
    pair.pools[0].forget(table)
    ours.copy_(in_order(plain, pair.pools[0].layout.order))
    q = torch.randn((queries, 4, 64), generator=pair.generator).bfloat16()
    k, v = torch.randn((2, queries, 2, 64), generator=pair.generator).bfloat16()
    kernel = pair.backends[0]
    kernel.plan([Segment(queries, 89 + queries, table)])
    assert kernel.run(0, q, k, v).isfinite().all()
