"""The C++ kernels as a library: built with the machine's compiler at first use, then cached.

Owns the choice of instruction set, the build and the cache; does not know what the kernels compute.
One process at a time compiles the files in parallel; other processes wait and use its result. A
build's name is a digest of sources, compiler and flags, and a file enters the cache by one atomic
rename. So where locks do not work, the same build may run twice, which does no harm. Without a
compiler there is no library: `KernelsUnavailable` says why.
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
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent

_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}
INSTRUCTION_SETS: dict[str, set[str]] = {
    "amx_bf16": _AVX512 | {"avx512_bf16", "amx_bf16", "amx_tile"},
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma"},
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
_TIMEOUT_S = 600.0  # for one compiler run; others may run at the same time
_UNFINISHED = "build-"  # prefix of the names of build folders


class KernelsUnavailable(Exception):
    """The kernels are not available on this machine; the message tells the operator why."""


def best_instruction_set(but: str | None = None) -> str:
    """The best of `INSTRUCTION_SETS`, except `but`, that this CPU has and Linux allows."""
    return next(name for name in INSTRUCTION_SETS if name != but and _is_good(name))


def _is_good(name: str) -> bool:
    needed = INSTRUCTION_SETS[name]
    if not needed <= set(_cpu("flags").split()):
        return False
    if _TILES in needed:
        return _may_use_tiles()
    return _DOT_PRODUCTS not in needed or _cpu("vendor_id") != _SLOW_DOT_PRODUCTS


@functools.cache
def load_library(instruction_set: str | None = None) -> ctypes.CDLL:
    """The kernels for `instruction_set` (None: the best on this machine), built unless cached. If
    the best set has AMX and cannot be built (an old compiler), loads the best set without AMX.

    Raises KernelsUnavailable.
    """
    if instruction_set is not None:
        return _load(instruction_set)
    best = best_instruction_set()
    try:
        return _load(best)
    except KernelsUnavailable as error:
        if _TILES not in INSTRUCTION_SETS[best]:
            raise
        try:
            library = _load(best_instruction_set(but=best))
        except KernelsUnavailable:
            raise error from None
        _log.warning(
            "kernels do not use this CPU's AMX, prompts take several times as long: %s", error
        )
        return library


def _load(name: str) -> ctypes.CDLL:
    if _TILES in INSTRUCTION_SETS[name] and not _may_use_tiles():
        raise KernelsUnavailable("Linux does not let this process use AMX")
    flags = [*_COMPILE_FLAGS, *_machine_flags(name)]
    compiler = _find_compiler()
    reasons = []
    for link_flags in _LINK_FLAGS:
        path = _cache_folder() / f"{_digest(compiler, [*flags, *link_flags])}.so"
        if not path.exists():
            _build(compiler, flags, link_flags, path)
        try:
            return _declare(ctypes.CDLL(str(path)))
        except OSError as error:  # no OpenMP in the process: the next flags bring it
            reasons.append(str(error))
    raise KernelsUnavailable(f"the built kernels do not load: {'; '.join(reasons)}")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    names = ["baton_attention", "baton_plan", "baton_rms_norm", "baton_rotate", "baton_gate"]
    names.append("baton_largest")
    if library.baton_has_linear():
        names += ["baton_linear", "baton_layers", "baton_step"]
    for name in names:
        function = getattr(library, name)
        function.argtypes = (ctypes.c_void_p,)
        function.restype = None
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


def _find_compiler() -> str:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    raise KernelsUnavailable("there is no C++ compiler (c++, g++ or clang++, or CXX)")


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "baton" / "kernels"


def _digest(compiler: str, flags: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in (compiler, _run([compiler, "--version"]), *flags):
        digest.update(part.encode() + b"\0")
    for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _build(compiler: str, flags: list[str], link_flags: tuple[str, ...], path: Path) -> None:
    """Compile and link in a temporary folder beside `path`, then move the result to `path`. Does
    nothing if another process has built it meanwhile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone_in(path.parent):
            if path.exists():
                return
            _log.info("building kernels for this CPU, once, into %s", path.parent)
            with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=path.parent) as folder:
                objects = _compile([compiler, *flags], Path(folder))
                library = Path(folder, path.name)
                _run([compiler, "-shared", *link_flags, *objects, "-o", str(library)])
                library.replace(path)
    except OSError as error:
        raise KernelsUnavailable(f"cannot build the kernels in {path.parent}: {error}") from error


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in `folder`, and remove what killed builds have left. On
    a file system without locks, several processes may build at once."""
    place = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(place, fcntl.LOCK_EX)
            for left in folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(place)


def _compile(command: list[str], folder: Path) -> list[str]:
    """Compile all sources to objects in `folder`."""
    cores = range(os.cpu_count() or 1)

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        _run([*command, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(len(cores), initializer=_use, initargs=(cores,)) as threads:
        return list(threads.map(compile_one, sorted(SOURCES.glob("*.cpp"))))


def _use(cores: range) -> None:
    """Pin this thread and its children to those of `cores` that the process may use, even if it is
    pinned to fewer so far: nothing else computes before the kernels are built."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


def _run(command: list[str]) -> str:
    """Run `command` and return its standard output. Raises KernelsUnavailable, with the command's
    standard error, if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise KernelsUnavailable(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
