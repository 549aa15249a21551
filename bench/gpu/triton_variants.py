"""Compiles Baton's Triton kernels for a card that is not there.

The operations of `engine.gpu.ops` are called as a model calls them, on small tensors in host
memory. Triton compiles what they would launch, for the named architecture, and launches nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch

from engine.attention.base import KvTarget
from engine.attention.invariant_backend import TileCall
from engine.attention.tiles import Partials, TileShape, TileTensors
from engine.gpu.fp8_format import FP8, MIN_CAPABILITY

_WIDTHS = (64, 1024, 4096, 16384)  # of rows: each takes another block or number of warps
_NUM_Q, _NUM_KV, _BLOCK_SIZE = 4, 2, 16

_GROUPS = (1, 4, 8)  # query heads per KV head
_SMALL = 89  # and 86: less shared memory than 8.0
_SHARED_BYTES = {8: 163 << 10, _SMALL: 99 << 10, 9: 227 << 10, 10: 227 << 10}
"""Of a thread block at most, by compute capability (CUDA's programming guide)."""

Build = tuple[str, Callable[[], object]]  # what has not been launched has no result


def triton_builds(
    capability: int, dtypes: Sequence[torch.dtype], head_dims: Sequence[int]
) -> list[tuple[str, Callable[[], None]]]:
    """The names of all variants, and how to compile each; `capability` is 90 for 9.0."""
    calls = [call for dtype in dtypes for call in _rows(dtype, has_fp8(capability))]
    for dtype, head_dim in product(dtypes, head_dims):
        kv_dtypes = (dtype, FP8) if has_fp8(capability) else (dtype,)
        calls += _heads(dtype, head_dim, kv_dtypes)
        calls += _tiles(dtype, head_dim, kv_dtypes)
    calls += [call for dtype in dtypes for call in _products(dtype)]
    return [(f"triton: {name}", _compiling(capability, run)) for name, run in calls]


def has_fp8(capability: int) -> bool:
    """Whether a card of this compute capability, 90 for 9.0, serves anything in fp8."""
    return divmod(capability, 10) >= MIN_CAPABILITY


def _compiling(capability: int, run: Callable[[], object]) -> Callable[[], None]:
    def build() -> None:
        with _compiles_only(capability):
            run()

    return build


def _rows(dtype: torch.dtype, has_fp8: bool) -> Iterator[Build]:
    from engine.gpu import ops  # needs Triton

    card = ops.TritonOps("silu", 1e-5, dtype)
    for width in _WIDTHS:
        x, weight = torch.zeros((1, width), dtype=dtype), torch.zeros(width, dtype=dtype)
        yield f"norm, {dtype}, {width} wide", partial(card.norm, x, weight)
        if has_fp8 and dtype == torch.bfloat16:  # the only input of fp8 products
            yield f"rows in fp8, {width} wide", partial(ops.scale_rows, x)
    if dtype == torch.bfloat16:  # logits have one dtype for all
        values, needed = torch.zeros((1, 64)), torch.ones((1, 1), dtype=torch.float64)
        yield "cut of top-p", partial(ops.lowest_kept, values, values.to(torch.int64), needed)
    x = torch.zeros((1, 2 * _WIDTHS[0]), dtype=dtype)
    yield f"gate, {dtype}", partial(card.gate, x)


def _heads(dtype: torch.dtype, head_dim: int, kv_dtypes: Sequence[torch.dtype]) -> Iterator[Build]:
    from engine.gpu import ops  # needs Triton

    card = ops.TritonOps("silu", 1e-5, dtype)
    for kv_dtype, has_norms in product(kv_dtypes, (False, True)):
        pool = torch.zeros((2, 1, _NUM_KV, _BLOCK_SIZE, head_dim)).to(kv_dtype)
        target = KvTarget(pool[0], pool[1], torch.zeros(1, dtype=torch.int64))
        heads = torch.zeros((1, _NUM_Q + 2 * _NUM_KV, head_dim), dtype=dtype)
        norms = torch.zeros((_NUM_Q + _NUM_KV, head_dim), dtype=dtype) if has_norms else None
        rotation = (torch.zeros((1, head_dim // 2)), torch.zeros((1, head_dim // 2)))
        name = f"heads of {head_dim}, {dtype}, KV in {kv_dtype}{', with norms' * has_norms}"
        run = partial(card.rotate_and_store, heads, norms, rotation, target)
        yield f"rotate and store, {name}", run
        if not has_norms:
            yield f"store, {name}", partial(ops.store, heads[:, _NUM_Q:].clone(), target)


def _tiles(dtype: torch.dtype, head_dim: int, kv_dtypes: Sequence[torch.dtype]) -> Iterator[Build]:
    """Batch-invariant attention, with parts that are joined."""
    from engine.gpu.invariant_ops import attend_tiles  # needs Triton

    for kv_dtype, group, window in product(kv_dtypes, _GROUPS, (None, 4096)):
        pool = torch.zeros((2, 1, 1, _BLOCK_SIZE, head_dim)).to(kv_dtype)
        q = torch.zeros((1, group, head_dim), dtype=dtype)
        blocks = torch.zeros(4, dtype=torch.int32)
        items, joins = blocks.view(1, 4), torch.zeros((1, 3), dtype=torch.int32)
        tiles = TileTensors(items, items, joins, blocks)
        partials = Partials.empty(group, head_dim, q.device)
        shape = TileShape.of(group)
        call = TileCall(q, q.clone(), pool[0], pool[1], tiles, shape, partials, window)
        name = f"heads of {head_dim}, {dtype}, KV in {kv_dtype}, groups of {group}"
        what = f"tiles, {name}{', sliding window' * (window is not None)}"
        yield what, partial(attend_tiles, call)


def _products(dtype: torch.dtype) -> Iterator[Build]:
    """Batch-invariant products, in parts that are added."""
    from engine.gpu.invariant_ops import log_totals, multiply  # needs Triton

    if dtype == torch.bfloat16:  # logits have one dtype for all
        yield "totals of log-probabilities", partial(log_totals, torch.zeros((1, 64)))
    x, weight, bias = (torch.zeros(each, dtype=dtype) for each in ((1, 4096), (256, 4096), 256))
    for out_dtype, has_bias, adds in (
        (dtype, False, False),
        (dtype, True, False),
        (dtype, False, True),
        (dtype, True, True),
        (torch.float32, False, False),
    ):
        out = torch.zeros((1, 256), dtype=out_dtype)
        ends = (bias if has_bias else None, out if adds else None)
        name = f"product, {dtype} to {out_dtype}{', bias' * has_bias}{', added' * adds}"
        yield name, partial(multiply, x, weight, *ends, out)


class _NoDriver:
    """Stands in for Triton's driver, which needs a card."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _compiles_only(capability: int) -> Iterator[None]:
    """Within this context a launch compiles its kernel for `capability`, and no more. Afterwards
    this process cannot launch any: Triton has no other driver."""
    compiler = importlib.import_module("triton.backends.compiler")
    driver = importlib.import_module("triton.runtime").driver
    jit = importlib.import_module("triton.runtime.jit").JITFunction
    run = jit.run

    def warm_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **(kwargs | {"warmup": True}))
        limit = _SHARED_BYTES[capability // 10 if capability != _SMALL else capability]
        if kernel.metadata.shared > limit:
            raise RuntimeError(f"needs {kernel.metadata.shared} bytes of shared memory of {limit}")
        return kernel

    driver.set_active(_NoDriver(compiler.GPUTarget("cuda", capability, 32)))
    jit.run = warm_up
    try:
        yield
    finally:
        jit.run = run
