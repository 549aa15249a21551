"""`baton build-kernels DIR`: compiles the C++ kernels ahead, for images that have no compiler.

Workers whose `kernels_dir` names the folder load the kernels for their CPU from it.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.arguments import split_names
from process.settings import setting, settings_or_exit
from protocol.errors import ConfigError, ServiceError

_X86 = ("x86_64", "AMD64")


@dataclass(frozen=True, kw_only=True)
class BuildKernelsSettings:
    """Settings of `baton build-kernels`."""

    instruction_sets: tuple[str, ...] = setting(
        (),
        help="CPUs to build for, separated by commas: amx_bf16, avx512_bf16, avx512, avx2, "
        "generic; none named: all that this compiler can build for",
        pattern="amx_bf16|avx512_bf16|avx512|avx2|generic",
    )


def main(argv: Sequence[str]) -> int:
    """Build into the named folder. Raises ConfigError, or ServiceError if a named set, or every
    set, cannot be built."""
    from engine.native.library import INSTRUCTION_SETS, KernelsUnavailable, build_library

    flags, folders = split_names(BuildKernelsSettings, argv)
    settings = settings_or_exit(
        BuildKernelsSettings,
        flags,
        prog="baton build-kernels DIR",
        description="Compile the CPU kernels into a folder that workers get as --kernels-dir.",
    )
    if len(folders) != 1:
        raise ConfigError(f"name one folder, not {len(folders)}: {folders}")
    folder = Path(folders[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)  # readable for the image's other users
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error
    names = settings.instruction_sets or tuple(
        name for name in INSTRUCTION_SETS if name == "generic" or platform.machine() in _X86
    )
    num_built = 0
    for name in names:
        started = time.monotonic()
        try:
            build_library(name, folder)
        except KernelsUnavailable as error:
            if settings.instruction_sets:
                raise ServiceError(f"{name}: {error}") from error
            print(f"{name}: not built: {error}", file=sys.stderr)
            continue
        num_built += 1
        print(f"{name}: built in {time.monotonic() - started:.0f} s")
    if not num_built:
        raise ServiceError("no kernels were built")
    return 0
