"""Our use of FlashInfer: arrays, views and arguments, against the torch backend; no card needed."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from dataclasses import dataclass
from types import ModuleType

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import Segment, StoringAttention
from engine.attention.flashinfer_attention import (
    FlashInferAttention,
    FlashInferChoice,
    FlashInferUnavailable,
    check_supported,
    choose_kernels,
    load_flashinfer,
    workspace_bytes,
)
from engine.attention.flashinfer_graph import DecodeBuffers, FixedDecode
from engine.attention.paging import NO_SLOT, pad_decodes, page
from engine.attention.pool_layers import PoolLayers
from engine.attention.torch_attention import TorchAttention
from engine.gpu import tuning
from engine.gpu.tuning import MixedStep, choose_mixed, faster_chunks
from engine.kv_pool import KvPool
from protocol.layout import KvLayout
from tests.effort import times
from tests.unit.engine.attention import fake_flashinfer
from tests.unit.engine.attention.torch_pool_layers import TorchPoolLayers

HEAD_DIM, NUM_BLOCKS = 8, 300
FAKE: ModuleType = fake_flashinfer
CHOICE = FlashInferChoice("fa3", decode_on_tensor_cores=False)


def make_pool(num_kv_heads: int, block_size: int) -> KvPool:
    layout = KvLayout(
        model_fingerprint="x",
        dtype="float32",
        num_layers=2,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=HEAD_DIM,
    )
    pool = KvPool(layout, NUM_BLOCKS)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return pool


@dataclass
class Case:
    """Segments over a pool of random contents, and the q, k, v of one step."""

    segments: list[Segment]
    block_size: int
    heads: tuple[int, int]
    windows: tuple[int | None, int | None]


@st.composite
def cases(draw, decodes_only: bool = False) -> Case:
    block_size = draw(st.sampled_from([1, 4, 16]))
    decodes = draw(st.lists(st.integers(0, 40), min_size=int(decodes_only), max_size=5))
    chunks = (
        []
        if decodes_only
        else draw(
            st.lists(
                st.tuples(st.integers(0, 40), st.integers(1, 20)),
                min_size=0 if decodes else 1,
                max_size=4,
            )
        )
    )
    free = iter(draw(st.permutations(range(NUM_BLOCKS))))
    segments = []
    for before, now in [(before, 1) for before in decodes] + chunks:
        table = [next(free) for _ in range(-(-(before + now) // block_size))]
        segments.append(Segment(now, before + now, [*table, 10**6]))  # what follows is not read
    heads = draw(st.sampled_from([(4, 4), (4, 2), (6, 1)]))
    return Case(
        segments, block_size, heads, draw(st.sampled_from([(None, None), (5, None), (1, 17)]))
    )


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    num_tokens = sum(segment.query_len for segment in case.segments)
    q, kv = case.heads
    heads = torch.randn((num_tokens, q + 2 * kv, HEAD_DIM), generator=generator)
    return tuple(torch.split(heads, [q, kv, kv], dim=1))


def assert_as_torch(case: Case, attention: StoringAttention, pool: KvPool, size: int) -> None:
    """Same results and the same pool afterwards; `size` rows of which the batch's come first."""
    expected_pool = make_pool(case.heads[1], case.block_size)
    oracle = TorchAttention(expected_pool, case.windows)
    oracle.plan(case.segments)
    attention.plan(case.segments)
    for layer in range(2):
        q, k, v = inputs(case)
        expected = oracle.run(layer, q, k, v)
        padding = (0, 0, 0, 0, 0, size - len(q))
        padded = [torch.nn.functional.pad(tensor, padding) for tensor in (q, k, v)]
        out = attention.run(layer, *padded)
        torch.testing.assert_close(out[: len(q)], expected, rtol=0, atol=1e-5)
        assert out.isfinite().all()
    assert torch.equal(pool.tensor, expected_pool.tensor)


@settings(max_examples=times(26, 80), deadline=None, derandomize=True)
@given(cases(), st.booleans())
def test_any_batch_equals_the_torch_backend(case, joins_mixed):
    pool = make_pool(case.heads[1], case.block_size)
    layers = TorchPoolLayers(pool, case.windows, case.heads[0], torch.float32)
    attention = FlashInferAttention(layers, workspace(), CHOICE, FAKE)
    attention.joins_mixed = joins_mixed
    num_tokens = sum(segment.query_len for segment in case.segments)
    assert_as_torch(case, attention, pool, num_tokens)


def test_a_mixed_step_is_one_call_where_that_is_joined(monkeypatch):
    pool = make_pool(2, 4)
    layers = TorchPoolLayers(pool, (None, None), 4, torch.float32)
    attention = FlashInferAttention(layers, workspace(), CHOICE, FAKE)
    calls = []
    for kind in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        run = getattr(FAKE, kind).run

        def counted(self, q, cache, *, out, kind=kind, run=run):
            calls.append((kind, len(q)))
            return run(self, q, cache, out=out)

        monkeypatch.setattr(getattr(FAKE, kind), "run", counted)
    mixed = [Segment(1, 6, [1, 2]), Segment(1, 3, [5]), Segment(4, 4, [9])]
    for joined, segments in ((False, mixed), (True, mixed), (True, mixed[:2])):
        calls.append(("joined", joined))
        attention.joins_mixed = joined
        attention.plan(segments)
        attention.attend(0, torch.zeros((sum(s.query_len for s in segments), 4, HEAD_DIM)))
    decode, prefill = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
    assert calls == [
        ("joined", False),
        (decode, 2),
        (prefill, 4),
        ("joined", True),
        (prefill, 6),
        ("joined", True),
        (decode, 2),  # nothing to join
    ]


def test_the_typical_mixed_step_lies_in_its_pool(caplog):
    step = MixedStep.typical(max_sequences=64, max_chunk=2048, max_context=600)
    assert step == MixedStep(32, 300, 300)
    small = MixedStep.typical(max_sequences=6, max_chunk=8, max_context=20)
    segments = small.segments(block_size=4, num_blocks=5)
    assert [(s.query_len, s.context_len) for s in segments] == [(1, 10)] * 3 + [(8, 8)]
    assert all(0 <= block < 5 for segment in segments for block in segment.block_table)
    pool = make_pool(2, 4)
    layers = TorchPoolLayers(pool, (None, 5), 4, torch.float32)
    attention = FlashInferAttention(layers, workspace(), CHOICE, FAKE)
    before = pool.tensor.clone()
    with caplog.at_level("INFO"):
        choose_mixed(attention, layers, small)
    assert torch.equal(pool.tensor, before)
    assert f"mixed steps take {'one' if attention.joins_mixed else 'two'}" in caplog.text


def test_chunks_go_by_the_kernel_that_takes_less_time(monkeypatch, caplog):
    pool = make_pool(2, 4)
    layers = TorchPoolLayers(pool, (None, None), 4, torch.float32)
    candidates = [
        FlashInferAttention(layers, workspace(), FlashInferChoice(name, True), FAKE)
        for name in ("fa3", "fa2")
    ]
    for slow, fast in (candidates, candidates[::-1]):
        spans = {slow: 2e-3, fast: 1e-3}
        monkeypatch.setattr(tuning, "time_attention", lambda each, *rest, spans=spans: spans[each])
        with caplog.at_level("INFO"):
            assert faster_chunks(candidates, layers, MixedStep(1, 4, 4)) is fast
        assert f"1.00 ms by {fast.choice.prefill}" in caplog.text


MIB = 1 << 20


@pytest.mark.parametrize(
    ("heads", "head_dim", "max_sequences", "expected"),
    [
        ((32, 8), 128, 64, 128 * MIB),  # 8B: what is recommended is enough
        ((128, 8), 128, 256, 128 * 511 * 16 * 129 * 4 + 1024),  # captured decodes of 405B
        ((64, 8), 128, 512, 64 * 767 * 16 * 129 * 4 + 1024),
        ((32, 1), 128, 64, 32 * 264 * 128 * 129 * 4 + 1024),  # chunks over one KV head
        ((16, 2), 256, 8, 16 * 132 * 64 * 257 * 4 + 1024),  # tiles of heads of 256 are smaller
    ],
)
def test_the_workspace_holds_what_the_scheduler_asks_for(heads, head_dim, max_sequences, expected):
    assert workspace_bytes(heads, head_dim, max_sequences, num_multiprocessors=132) == expected


@settings(max_examples=times(25, 40), deadline=None, derandomize=True)
@given(st.lists(cases(decodes_only=True), min_size=1, max_size=3), st.integers(0, 3))
def test_fixed_decodes_equal_the_torch_backend_step_after_step(steps, padding):
    first = steps[0]
    steps = [s for s in steps if (s.block_size, s.heads) == (first.block_size, first.heads)]
    size = max(len(case.segments) for case in steps) + padding
    pool = make_pool(first.heads[1], first.block_size)
    contents = pool.tensor.clone()
    layers = TorchPoolLayers(pool, first.windows, first.heads[0], torch.float32)
    buffers = DecodeBuffers(size + 1, size * 50, pool.device)
    attention = FixedDecode(layers, size, buffers, workspace(), CHOICE, FAKE)
    for case in steps:
        pool.tensor.copy_(contents)
        same_windows = Case(case.segments, case.block_size, case.heads, first.windows)
        assert_as_torch(same_windows, attention, pool, size)


def test_one_copy_fills_the_buffers_of_captured_decodes():
    buffers = DecodeBuffers(3, 20, torch.device("cpu"))
    pieces = (buffers.slots, buffers.block_starts, buffers.last_lens, buffers.blocks)
    starts = [piece.data_ptr() for piece in pieces]
    assert len({piece.untyped_storage().data_ptr() for piece in pieces}) == 1
    assert all(start % 512 == starts[0] % 512 for start in starts)
    for segments in ([Segment(1, 9, [3, 5, 7]), Segment(1, 2, [11])], [Segment(1, 4, [8])]):
        batch = pad_decodes(page(segments, 4), 3)
        buffers.fill(batch)
        for piece, wanted in zip(
            pieces, (batch.slots, batch.block_starts, batch.last_lens, batch.blocks), strict=True
        ):
            assert piece[: len(wanted)].tolist() == wanted.tolist()
    assert [piece.data_ptr() for piece in pieces] == starts
    assert [len(piece) for piece in pieces] == [3, 4, 3, 20]


def workspace() -> torch.Tensor:
    return torch.empty(16, dtype=torch.uint8)


@settings(max_examples=times(33, 100), deadline=None, derandomize=True)
@given(cases())
def test_pages_and_slots_are_those_of_each_token(case):
    batch = page(case.segments, case.block_size)
    at = 0
    for index, segment in enumerate(case.segments):
        blocks = batch.blocks[batch.block_starts[index] : batch.block_starts[index + 1]]
        assert (len(blocks) - 1) * case.block_size + batch.last_lens[index] == segment.context_len
        assert list(blocks) == list(segment.block_table[: len(blocks)])
        assert batch.query_starts[index] == at
        for position in range(segment.context_len - segment.query_len, segment.context_len):
            block, offset = divmod(position, case.block_size)
            assert batch.slots[at] == segment.block_table[block] * case.block_size + offset
            at += 1
    assert batch.query_starts[-1] == batch.num_tokens == at
    int32 = (batch.query_starts, batch.block_starts, batch.blocks, batch.last_lens)
    assert all(array.dtype == "int32" and array.flags.c_contiguous for array in int32)


@given(cases(decodes_only=True), st.integers(0, 4))
def test_padding_reads_what_is_there_and_stores_nothing(case, more):
    batch = page(case.segments, case.block_size)
    size = batch.num_segments + more
    padded = pad_decodes(batch, size)
    assert padded.num_segments == padded.num_tokens == size
    kept = batch.num_segments
    assert padded.block_starts[: kept + 1].tolist() == batch.block_starts.tolist()
    assert padded.slots[:kept].tolist() == batch.slots.tolist()
    assert (padded.slots[kept:] == NO_SLOT).all()
    assert (padded.last_lens[kept:] == 1).all()
    for row in range(kept, size):
        start, end = padded.block_starts[row : row + 2]
        assert padded.blocks[start:end].tolist() == [batch.blocks[0]]


def test_views_of_the_pool_share_its_memory():
    pool = make_pool(num_kv_heads=2, block_size=4)
    layers = PoolLayers(pool, (None, None), 4, torch.float32)
    keys, values = layers.caches[1]
    per_head = 4 * HEAD_DIM
    assert keys.shape == values.shape == (NUM_BLOCKS, 2, 4, HEAD_DIM)
    assert keys.stride() == values.stride() == (2 * 2 * 2 * per_head, per_head, HEAD_DIM, 1)
    assert keys.data_ptr() == pool.tensor[0, 1, 0].data_ptr()
    assert values.data_ptr() == pool.tensor[0, 1, 1].data_ptr()


def test_a_pool_of_8_bits_is_read_where_it_was_written():
    wide = make_pool(2, 4)
    narrow = KvPool(msgspec.structs.replace(wide.layout, dtype="float8_e4m3fn"), NUM_BLOCKS)
    layers = TorchPoolLayers(narrow, (None, None), 4, torch.float32)
    ours = FlashInferAttention(layers, workspace(), CHOICE, FAKE)
    theirs = TorchAttention(wide, (None, None))
    segments = [Segment(1, 1, [7]), Segment(9, 9, [3, 250, 1])]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((10, heads, HEAD_DIM), generator=generator) for heads in (4, 2, 2))
    for attention in (ours, theirs):
        attention.plan(segments)
    for layer in (0, 1):
        got, expected = (attention.run(layer, q, k, v) for attention in (ours, theirs))
        assert 0 < (got - expected).norm() / expected.norm() < 0.06


@pytest.mark.parametrize(
    ("heads", "dtype", "is_hopper", "prefill", "tensor_cores"),
    [
        ((32, 8), torch.bfloat16, True, "fa3", True),
        ((16, 8), torch.bfloat16, True, "fa3", False),
        ((16, 8), torch.bfloat16, False, "fa2", False),
        ((10, 2), torch.float16, True, "fa3", True),  # groups of 5 have no plain kernel
        ((16, 8), torch.float8_e4m3fn, True, "fa2", True),
    ],
)
def test_choice_of_kernels(heads, dtype, is_hopper, prefill, tensor_cores):
    choice = choose_kernels(*heads, dtype, is_hopper)
    assert (choice.prefill, choice.decode_on_tensor_cores) == (prefill, tensor_cores)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "says"),
    [
        ("cpu", torch.bfloat16, 128, "not on cpu"),
        ("cuda:0", torch.float32, 128, "not torch.float32"),
        ("cuda:0", torch.bfloat16, 96, "not of 96"),
    ],
)
def test_what_flashinfer_cannot_serve_is_said(device, dtype, head_dim, says):
    with pytest.raises(FlashInferUnavailable, match=says):
        check_supported(torch.device(device), dtype, head_dim)


def test_a_missing_library_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "triton", sys)
    with pytest.raises(FlashInferUnavailable, match="cannot be loaded"):
        load_flashinfer()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"
)
def test_the_fake_has_the_librarys_parameters():
    """Names, order of positional ones, and defaults, of everything that the fake takes."""
    real = importlib.import_module("flashinfer")
    for name in (
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
    ):
        for method in ("__init__", "plan", "run"):
            theirs = _parameters(getattr(real, name), method)
            ours = inspect.signature(getattr(getattr(fake_flashinfer, name), method)).parameters
            _assert_parameters(f"{name}.{method}", ours, theirs)
    theirs = inspect.signature(real.fast_decode_plan).parameters
    decode_plan = inspect.signature(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan)
    for parameter in decode_plan.parameters:
        assert parameter in theirs
    assert list(theirs)[:4] == ["self", "indptr", "indices", "last_page_len"]


def _parameters(wrapper, method) -> dict[str, inspect.Parameter]:
    """A method's parameters. Where `plan` takes any keyword, as since 0.7, the method that it
    passes them to names them."""
    found = dict(inspect.signature(getattr(wrapper, method)).parameters)
    if "kwargs" in found and method == "plan":
        found |= inspect.signature(wrapper._plan_impl).parameters
    return found


def _assert_parameters(where, ours, theirs) -> None:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    positional = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == list(theirs)[: len(positional)], where
    for name, parameter in ours.items():
        if parameter.kind not in variable:
            assert name in theirs, f"{where} has no {name}"
            assert theirs[name].default == parameter.default, f"{where}: {name}"
