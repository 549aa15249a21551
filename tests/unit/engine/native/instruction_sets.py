"""What kernels can be built for and tried on this machine: those of its CPU, and nightly, where it
multiplies bf16 but has no AMX, those of AMX over tiles in software."""

from __future__ import annotations

import ctypes
import functools
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from engine.native import library
from engine.native.library import INSTRUCTION_SETS, best_instruction_set, load_library
from tests.effort import NIGHTLY

_TILES = "amx_bf16"
_DOT_PRODUCTS = "avx512_bf16"
_SOFTWARE_TILES = Path(__file__).parent / "software_tiles" / "tile_instructions.h"


def usable_instruction_sets() -> list[str]:
    """The instruction sets that this machine runs, in the order of `INSTRUCTION_SETS`. Everyday, a
    CPU with AMX leaves out `avx512_bf16`, which compiles for a minute. Nightly, a CPU that
    multiplies bf16 but has no AMX tries AMX in software."""
    flags = set(library._cpu("flags").split())
    found = [name for name, needed in INSTRUCTION_SETS.items() if needed <= flags]
    if best_instruction_set() == _TILES:
        return [name for name in found if NIGHTLY or name != _DOT_PRODUCTS]
    in_software = [_TILES] if NIGHTLY and flags >= INSTRUCTION_SETS[_DOT_PRODUCTS] else []
    return in_software + [name for name in found if name != _TILES]


def instruction_sets_with_products() -> list[str]:
    """The usable instruction sets whose kernels have linear layers."""
    return [name for name in usable_instruction_sets() if "fma" in INSTRUCTION_SETS[name]]


def kernels_for(instruction_set: str) -> ctypes.CDLL:
    """The kernels for one of the usable sets. Raises KernelsUnavailable."""
    if instruction_set == _TILES and best_instruction_set() != _TILES:
        return _load_in_software()
    if instruction_set == best_instruction_set() or NIGHTLY:
        return load_library(instruction_set)
    return _load_quickly_built(instruction_set)


@functools.cache
def _load_quickly_built(instruction_set: str) -> ctypes.CDLL:
    """Compiles in a quarter (without vectors) to two thirds of the time. Multiplications and
    additions become fused ones where -O3 makes them so, for the same bits."""
    flags = ["-O1" if flag == "-O3" else flag for flag in library._COMPILE_FLAGS]
    assert "-O1" in flags
    flags.append("-fexpensive-optimizations")
    with mock.patch.object(library, "_COMPILE_FLAGS", flags):
        return library.load_library.__wrapped__(instruction_set)


@functools.cache
def _load_in_software() -> ctypes.CDLL:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(
            library, SOURCES=native_sources(Path(folder)), _may_use_tiles=lambda: True
        ),
    ):
        return library.load_library.__wrapped__(_TILES)


def native_sources(folder: Path) -> Path:
    """`folder`, with a copy of the kernels' sources and tiles that this CPU has: its own, or those
    in software."""
    for path in (*library.SOURCES.glob("*.cpp"), *library.SOURCES.glob("*.h")):
        shutil.copy(path, folder)
    if best_instruction_set() != _TILES:
        shutil.copy(_SOFTWARE_TILES, folder)
    return folder
