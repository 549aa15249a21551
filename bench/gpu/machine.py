"""The machine that rows come from: card, driver, and versions of the packages that compute."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.utils.cpp_extension import CUDA_HOME

from bench.gpu.checks import Row
from engine.gpu.toolchain import HEADERS, HOME, LIBRARIES, compile_sample, prepare_builds

_PACKAGES = ("flashinfer-python", "apache-tvm-ffi", "triton", "transformers", "nixl-cu13")
_QUERY_S = 20.0


def describe_machine(device: torch.device) -> Iterator[Row]:
    """The installed software, and the names of missing packages, without which some parts fail."""
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    note = (
        f"{properties.name}, compute capability {capability}, "
        f"{properties.multi_processor_count} multiprocessors, driver {_driver()}"
    )
    yield Row("limits", "card", properties.total_memory / 2**30, "GiB", note=note)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"CUDA": str(torch.version.cuda)} | {name: _version(name) for name in _PACKAGES}
    missing = [name for name, found in versions.items() if found == "missing"]
    note = ", ".join(f"{name} {found}" for name, found in versions.items())
    yield Row("limits", "packages that are missing", len(missing), "", "= 0", note)
    tools = {name: _tool(name) for name in ("nvcc", "ninja")}
    note = ", ".join(f"{name} {found}" for name, found in tools.items())
    absent = sum(found == "missing" for found in tools.values())
    yield Row("limits", "tools that are missing", absent, "", "= 0", note)
    yield check_builds(os.environ | {})


def check_builds(environment: dict[str, str]) -> Row:
    """Whether FlashInfer's kernels can be built: compiles and links a small file with the compiler,
    headers and libraries that a build will use."""
    major = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None
    started = time.monotonic()
    reason = prepare_builds(environment, major) or compile_sample(environment)
    found = ", ".join(f"{name} {environment.get(name, '-')}" for name in (HOME, HEADERS, LIBRARIES))
    note = f"{reason}; {found}" if reason else f"{time.monotonic() - started:.1f} s; {found}"
    name = "builds that fail, of a small kernel"
    return Row("limits", name, int(bool(reason)), "", "= 0", note)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _tool(name: str) -> str:
    """A tool's location, as FlashInfer finds it: on the path, or with CUDA."""
    folders = [f"{CUDA_HOME}/bin"] if CUDA_HOME else []
    return shutil.which(name) or shutil.which(name, path=":".join(folders)) or "missing"


def _driver() -> str:
    """The driver's version, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return said.stdout.split("\n")[0].strip()
