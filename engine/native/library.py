"""The C++ kernels as a library: built with the machine's compiler at first use, then cached.

Owns the choice of instruction set, the build and the cache; does not know what the kernels compute.
One process at a time compiles the files in parallel; other processes wait and use its result. A
build's name has digests of sources, flags and compiler, and a file enters the cache by one atomic
rename. So where locks do not work, the same build may run twice, which does no harm. Without a
compiler, a library of the same sources and flags is used, from a folder built ahead or the cache.
If there is none, `KernelsUnavailable` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from engine.native.compiler import KernelsUnavailable, compile_objects, find_compiler, run
from engine.native.kernel_cache import cache_folder, why_not

__all__ = ["INSTRUCTION_SETS", "KernelsUnavailable", "best_instruction_set", "load_library"]

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent

_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"}
INSTRUCTION_SETS: dict[str, set[str]] = {
    "amx_bf16": _AVX512 | {"avx512_bf16", "amx_bf16", "amx_tile"},
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "f16c"},
    "generic": set(),
}
"""The CPU flags that each set needs, in Linux's names; the best set comes first."""

_TILES, _DOT_PRODUCTS = "amx_tile", "avx512_bf16"
_SLOW_DOT_PRODUCTS = "GenuineIntel"
"""Vendor whose CPUs take as long for one vector of bf16 pair dot products as for four fused
multiply-adds, which do twice as many multiplications."""
_ARCH_PRCTL, _REQUEST_FEATURE, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64

_COMPILE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi")
# First without libgomp: torch's copy, which the process has already loaded, then serves both, so no
# second thread team spins beside torch's.
_LINK_FLAGS: tuple[tuple[str, ...], ...] = ((), ("-fopenmp",))
_LOCK_POLL_S = 0.1
_UNFINISHED = "build-"  # prefix of the names of build folders


def best_instruction_set() -> str:
    """The best of `INSTRUCTION_SETS` that this CPU has and Linux allows."""
    return _good_instruction_sets()[0]


def _good_instruction_sets() -> list[str]:
    """The instruction sets that this CPU has and Linux allows, best first."""
    return [name for name in INSTRUCTION_SETS if _is_good(name)]


def _is_good(name: str) -> bool:
    needed = INSTRUCTION_SETS[name]
    if not needed <= set(_cpu("flags").split()):
        return False
    if _TILES in needed:
        return _may_use_tiles()
    return _DOT_PRODUCTS not in needed or _cpu("vendor_id") != _SLOW_DOT_PRODUCTS


@functools.cache
def load_library(instruction_set: str | None = None, prebuilt: Path | None = None) -> ctypes.CDLL:
    """The kernels for `instruction_set` (None: the best on this machine): those in the folder
    `prebuilt`, else the cached ones, else built. If the best set is unavailable, loads the next
    best that exists; one without AMX (for old compilers) may also be built.

    Raises KernelsUnavailable.
    """
    if instruction_set is not None:
        return _load(instruction_set, prebuilt)
    best, *others = _good_instruction_sets()
    try:
        return _load(best, prebuilt)
    except KernelsUnavailable as error:
        reason = error
    may_build = _TILES in INSTRUCTION_SETS[best]
    for name in others:
        try:
            library = _load(name, prebuilt, may_build)
        except KernelsUnavailable:
            may_build = False
            continue
        _log.warning("kernels for %s are used, slower than those for %s: %s", name, best, reason)
        return library
    raise reason


def build_library(instruction_set: str, folder: Path) -> list[Path]:
    """Build the kernels for `instruction_set` into `folder`, for `load_library` on machines without
    a compiler; returns the files. Raises KernelsUnavailable."""
    compiler = find_compiler()
    flags = [*_COMPILE_FLAGS, *_machine_flags(instruction_set)]
    paths = {links: folder / _file_name(compiler, flags, links) for links in _LINK_FLAGS}
    _build(compiler, flags, paths)
    return list(paths.values())


def _load(name: str, prebuilt: Path | None, may_build: bool = True) -> ctypes.CDLL:
    if _TILES in INSTRUCTION_SETS[name] and not _may_use_tiles():
        raise KernelsUnavailable("Linux does not let this process use AMX")
    flags = [*_COMPILE_FLAGS, *_machine_flags(name)]
    reasons = []
    for link_flags in _LINK_FLAGS:
        path = None if prebuilt is None else _find(prebuilt, flags, link_flags)
        path = path or _cached(flags, link_flags, may_build)
        if reason := why_not(path):
            raise KernelsUnavailable(f"the kernels {path} are not loaded: {reason}")
        try:
            return _declare(ctypes.CDLL(str(path)))
        except OSError as error:  # no OpenMP in the process: the next flags bring it
            reasons.append(str(error))
    raise KernelsUnavailable(f"the built kernels do not load: {'; '.join(reasons)}")


def _cached(flags: list[str], link_flags: tuple[str, ...], may_build: bool) -> Path:
    """The cached library, built first if that is allowed. Without a working compiler, a library of
    any compiler will do. Raises KernelsUnavailable."""
    try:
        folder = cache_folder()
    except OSError as error:
        raise KernelsUnavailable(f"there is no folder for them: {error}") from error
    try:
        compiler = find_compiler()
        path = folder / _file_name(compiler, flags, link_flags)
        if not path.exists():
            if not may_build:
                raise KernelsUnavailable(f"they are not in {folder}")
            _build(compiler, flags, {link_flags: path})
        return path
    except KernelsUnavailable:
        found = _find(folder, flags, link_flags)
        if found is None:
            raise
        return found


def _find(folder: Path, flags: list[str], link_flags: tuple[str, ...]) -> Path | None:
    """The newest library in `folder` of our sources and these flags, by whichever compiler."""
    found = list(folder.glob(f"{_digest_of_sources([*flags, *link_flags])}-*.so"))
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    names = ["baton_attention", "baton_plan", "baton_rms_norm", "baton_rotate", "baton_gate"]
    names.append("baton_largest")
    if library.baton_has_linear():
        names += ["baton_linear", "baton_experts", "baton_layers", "baton_step"]
    for name in names:
        function = getattr(library, name)
        function.argtypes = (ctypes.c_void_p,)
        function.restype = None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.baton_rank_sum.argtypes = (pointer, pointer, number, ctypes.c_int32)
    library.baton_rank_share.argtypes = (pointer, pointer, number)
    library.baton_rank_gather.argtypes = (pointer, pointer, pointer, number, pointer)
    for function in (library.baton_rank_sum, library.baton_rank_share, library.baton_rank_gather):
        function.restype = ctypes.c_int64
    library.baton_stop_ranks.argtypes = (ctypes.c_void_p,)
    library.baton_stop_ranks.restype = None
    for function in (library.baton_stage_send, library.baton_stage_receive):
        function.argtypes, function.restype = (ctypes.c_void_p,), ctypes.c_int32
    return library


@functools.cache
def _may_use_tiles() -> bool:
    """Request AMX's registers from Linux for this process and its threads; True if granted."""
    result: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_FEATURE, _TILE_DATA)
    return result == 0


def _machine_flags(instruction_set: str) -> list[str]:
    flags = sorted(INSTRUCTION_SETS[instruction_set])
    return ["-m" + flag.replace("_", "-" if flag.startswith("amx") else "") for flag in flags]


def _cpu(field: str) -> str:
    """A field of the first CPU in Linux's /proc/cpuinfo; empty on other systems, which then use
    the generic set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def _file_name(compiler: str, flags: list[str], link_flags: tuple[str, ...]) -> str:
    """The name of a built library: a digest of sources and flags, and one of the compiler."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{compiler}\0{run([compiler, '--version'])}".encode())
    return f"{_digest_of_sources([*flags, *link_flags])}-{digest.hexdigest()}.so"


def _digest_of_sources(flags: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for flag in flags:
        digest.update(flag.encode() + b"\0")
    for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _build(compiler: str, flags: list[str], paths: dict[tuple[str, ...], Path]) -> None:
    """Compile in a temporary folder beside `paths`, which share a folder. Link each of them with
    its own flags and move it there. Does nothing if another process has built it meanwhile."""
    parent = next(iter(paths.values())).parent
    try:
        for each in (parent.parent, parent):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone_in(parent):
            if all(path.exists() for path in paths.values()):
                return
            _log.info("building kernels for this CPU, once, into %s", parent)
            with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=parent) as folder:
                sources = sorted(SOURCES.glob("*.cpp"))
                objects = compile_objects([compiler, *flags], sources, Path(folder))
                for link_flags, path in paths.items():
                    library = Path(folder, path.name)
                    run([compiler, "-shared", *link_flags, *objects, "-o", str(library)])
                    library.chmod(0o755)  # whatever the umask lets others do
                    library.replace(path)
    except OSError as error:
        raise KernelsUnavailable(f"cannot build the kernels in {parent}: {error}") from error


def _lock(place: int) -> None:
    """Lock an open folder as soon as nobody else has it. Raises OSError where locks do not work."""
    while True:
        try:
            return fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_POLL_S)  # not in the system call, so that a signal always ends it


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in `folder`, and remove what killed builds have left. On
    a file system without locks, several processes may build at once."""
    place = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            _lock(place)
            for left in folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(place)
