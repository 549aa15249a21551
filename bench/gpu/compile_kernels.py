"""Compiles every GPU kernel that Baton's configurations can choose; needs no card.

`./scripts/compile_gpu_kernels` prints one line for each kernel: its time, or the first error of its
compiler. FlashInfer's kernels stay in its cache (below FLASHINFER_WORKSPACE_BASE or the home
folder), one folder per architecture, where a worker finds them. Triton's are compiled for a check
only. With --install FlashInfer's kernels, for all architectures together, become part of its
installed package, as images have them: then workers need neither nvcc nor a cache. nvcc and its
libraries come from the CUDA toolkit or from NVIDIA's Python packages.

The operations of `engine.gpu.ops` are called as a model calls them, on small tensors in host
memory. Triton compiles what they would launch, for the named architecture, and launches nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import torch

from engine.attention.base import KvTarget
from engine.attention.flashinfer_attention import HEAD_DIMS
from engine.attention.invariant_attention import TileCall
from engine.attention.tiles import Partials, TileShape, TileTensors
from engine.gpu.fp8_format import FP8, MIN_CAPABILITY
from engine.gpu.toolchain import compile_sample, first_error, prepare_builds

ARCHITECTURES = ("8.0", "9.0a", "10.0a")
KINDS = ("fa2", "fa3", "decode", "triton")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_ONE = "BATON_COMPILE_ONE"  # set in the process of one architecture
_WIDTHS = (64, 1024, 4096, 16384)  # of rows: each takes another block or number of warps
_NUM_Q, _NUM_KV, _BLOCK_SIZE = 4, 2, 16
_GROUPS = (1, 4, 8)  # query heads per KV head
_SMALL = 89  # and 86: less shared memory than 8.0
_SHARED_BYTES = {8: 163 << 10, _SMALL: 99 << 10, 9: 227 << 10, 10: 227 << 10}
"""The most shared memory of a thread block, by compute capability (CUDA's programming guide)."""
Build = tuple[str, Callable[[], object]]  # a kernel that was not launched has no result


@dataclass(frozen=True)
class Variant:
    """One of FlashInfer's modules: a kernel for a dtype and a head size, with or without a sliding
    window. `kind` is fa2 or fa3 (chunks; fa2 also decodes on tensor cores) or decode."""

    kind: str
    dtype: str
    kv_dtype: torch.dtype
    head_dim: int
    has_window: bool

    def __str__(self) -> str:
        kv = "fp8" if self.kv_dtype == FP8 else "16 bits"
        window = ", sliding window" if self.has_window else ""
        return f"{self.kind}: {self.dtype}, KV in {kv}, heads of {self.head_dim}{window}"


def variants(
    kinds: Sequence[str], dtypes: Sequence[str], head_dims: Sequence[int], capability: int
) -> Iterator[Variant]:
    """The modules that `choose_kernels` can lead to on a card of this compute capability, 90 for
    9.0. fa3 is Hopper's; fp8 KV takes fa2 alone."""
    is_hopper = capability // 10 == 9
    for kind, dtype, head_dim, has_window in product(kinds, dtypes, head_dims, (False, True)):
        if kind == "triton" or (kind == "fa3" and not is_hopper):
            continue
        takes_fp8 = kind == "fa2" and has_fp8(capability)
        for kv_dtype in (DTYPES[dtype], FP8) if takes_fp8 else (DTYPES[dtype],):
            yield Variant(kind, dtype, kv_dtype, head_dim, has_window)


def compile_variant(variant: Variant, installs: bool = False) -> None:
    """Build one module into FlashInfer's cache, or its package. Raises what FlashInfer raises."""
    dtype = DTYPES[variant.dtype]
    shape = (variant.head_dim, variant.head_dim, 0, variant.has_window, False)
    arguments = (dtype, variant.kv_dtype, dtype, torch.int32, *shape)
    with _only_built(installs):
        if variant.kind == "decode":
            importlib.import_module("flashinfer.decode").get_batch_decode_module(*arguments)
        else:
            prefill = importlib.import_module("flashinfer.prefill")
            prefill.get_batch_prefill_module(variant.kind, *arguments, False)
        raise RuntimeError("FlashInfer has loaded a module without building it")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="compile_gpu_kernels", description=__doc__)
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, help="compute capabilities")
    parser.add_argument("--kind", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--dtype", nargs="+", default=tuple(DTYPES), choices=tuple(DTYPES))
    parser.add_argument("--head-dim", nargs="+", type=int, default=HEAD_DIMS, choices=HEAD_DIMS)
    parser.add_argument("--install", action="store_true", help="into FlashInfer's package")
    parser.add_argument("--list", action="store_true", help="name the kernels, compile none")
    arguments = parser.parse_args()
    needs_triton = "triton" in arguments.kind and not arguments.install
    if needs_triton and importlib.util.find_spec("triton") is None:
        print(
            "no kernel can be built: install triton, or name other kinds (--kind)", file=sys.stderr
        )
        return 1
    groups = [arguments.arch] if arguments.install else [[arch] for arch in arguments.arch]
    if _ONE in os.environ or arguments.list:
        with TemporaryDirectory(prefix="baton-triton-") as folder:
            os.environ["TRITON_CACHE_DIR"] = folder  # otherwise a second run would compile nothing
            return int(sum(_compile(group, arguments) for group in groups) > 0)
    needs_nvcc = set(arguments.kind) != {"triton"}
    reason = needs_nvcc and (prepare_builds(os.environ) or compile_sample(os.environ))
    if reason:
        print(f"no kernel can be built: {reason}", file=sys.stderr)
        return 1
    statuses = []
    for group in groups:  # FlashInfer reads the architectures once, when it is imported
        environment = os.environ | {_ONE: "1", "FLASHINFER_CUDA_ARCH_LIST": " ".join(group)}
        program = [sys.executable, "-m", "bench.gpu.compile_kernels"]
        command = [*program, *sys.argv[1:], "--arch", *group]
        statuses.append(subprocess.run(command, env=environment, check=False).returncode)
    return int(any(statuses))


def _compile(group: Sequence[str], arguments: argparse.Namespace) -> int:
    """Compile all kernels of these architectures at once; returns how many failed."""
    capabilities = [int(arch.rstrip("af").replace(".", "")) for arch in group]
    wanted = dict.fromkeys(
        variant
        for capability in capabilities
        for variant in variants(arguments.kind, arguments.dtype, arguments.head_dim, capability)
    )
    builds: list[tuple[str, Callable[[], None]]] = [
        (str(variant), partial(compile_variant, variant, arguments.install)) for variant in wanted
    ]
    if "triton" in arguments.kind and not arguments.install:
        dtypes = [DTYPES[name] for name in arguments.dtype]
        builds += triton_builds(capabilities[0], dtypes, arguments.head_dim)
    where, failed = " ".join(group), 0
    for name, build in builds:
        if arguments.list:
            print(f"{where}  {name}")
            continue
        error, spent_s = _timed(build)
        failed += bool(error)
        print(f"{where}  {name}: {f'FAILED: {error}' if error else f'{spent_s:.1f} s'}", flush=True)
    if not arguments.list:
        print(f"{where}  {len(builds) - failed} of {len(builds)} kernels compiled", flush=True)
    return failed


def _timed(build: Callable[[], None]) -> tuple[str, float]:
    """The first error of a build, "" if it succeeded, and its seconds."""
    started = time.monotonic()
    try:
        build()
    except Exception as error:  # noqa: BLE001 - whatever fails is a line, and others are tried
        return first_error(str(error) or repr(error)), time.monotonic() - started
    return "", time.monotonic() - started


class _Built(Exception):
    """A module has been built, and is not loaded: that would need the driver."""


@contextmanager
def _only_built(installs: bool) -> Iterator[None]:
    """Within this context FlashInfer builds a module where it would also load it. Modules in its
    package (or in flashinfer-jit-cache) are there already."""
    core = importlib.import_module("flashinfer.jit.core")
    spec = getattr(core, "JitSpecNvcc", None) or core.JitSpec  # the latter before 0.7
    original = spec.build_and_load

    def build(self: Any) -> None:
        if not self.is_aot:
            self.build(verbose=False)
            if installs:
                self.aot_path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.jit_library_path, self.aot_path)
        raise _Built

    spec.build_and_load = build
    try:
        yield
    except _Built:
        pass
    finally:
        spec.build_and_load = original


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
        x, weight = torch.zeros((1, width), dtype=dtype), torch.zeros(width)
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
        norms = torch.zeros((_NUM_Q + _NUM_KV, head_dim)) if has_norms else None
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
        call = TileCall(q, q.clone(), pool[0], pool[1], tiles, shape, partials, window, 1.0)
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


if __name__ == "__main__":
    sys.exit(main())
