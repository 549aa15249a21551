"""CUDA's compiler, headers and libraries, as FlashInfer needs them to build its kernels.

FlashInfer looks for all of them in one folder, CUDA_HOME, as NVIDIA's installers lay it out. Python
packages (nvidia-cuda-nvcc, nvidia-cuda-runtime, nvidia-curand) lay them out differently: headers
may be in another folder, libraries lack the names that a linker looks for, and a machine without a
card has no library of the driver. `find_toolchain` gives the variables by which compilers find the
installed parts, `compile_sample` tests them. Knows no kernel and never imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.native.kernel_cache import cache_folder

HOME, HEADERS, LIBRARIES = "CUDA_HOME", "CPATH", "LIBRARY_PATH"
_INSTALLED = Path("/usr/local/cuda")
_SYSTEM_LIBRARIES = tuple(
    Path(folder)
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
)
_TIMEOUT_S = 300.0
_SAYS_WHY = re.compile(r"\berror\b|cannot find|not (found|supported)", re.I)
_SAMPLE = """\
#include <cuda.h>
#include <cuda_runtime.h>
#include <curand_kernel.h>

__global__ void draw(float* out) {
  curandStatePhilox4_32_10_t state;
  curand_init(1, threadIdx.x, 0, &state);
  out[threadIdx.x] = curand_uniform(&state);
}

extern "C" int launch(float* out) {
  draw<<<1, 1>>>(out);
  return cudaGetLastError() + cuInit(0);
}
"""


class ToolchainMissing(Exception):
    """A part of the toolchain is not installed; the message names it and what to install."""


@dataclass(frozen=True)
class Toolchain:
    """Where the parts are: `home` has bin/nvcc; the variables lead other tools to the rest."""

    home: Path
    headers: Path | None  # a folder of headers that `home` lacks
    libraries: Path | None  # a folder of libraries that `home` lacks

    def set_in(self, environment: MutableMapping[str, str]) -> None:
        """Set CUDA_HOME, and put the folders in front of CPATH and LIBRARY_PATH."""
        environment[HOME] = str(self.home)
        for name, folder in ((HEADERS, self.headers), (LIBRARIES, self.libraries)):
            others = [each for each in environment.get(name, "").split(os.pathsep) if each]
            if folder is not None and str(folder) not in others:
                environment[name] = os.pathsep.join([str(folder), *others])


def find_toolchain(
    environment: Mapping[str, str],
    links: Path,
    cuda_major: int | None = None,
    packages: Sequence[Path] | None = None,
    installed: Path = _INSTALLED,
) -> Toolchain:
    """The toolchain of this machine. Raises ToolchainMissing.

    CUDA_HOME (or CUDA_PATH) of the environment is kept; otherwise a folder whose nvcc is of
    `cuda_major`, torch's, is preferred. `packages` are the folders of NVIDIA's Python packages, by
    default those installed. For parts that CUDA_HOME lacks, links are made in the folder `links`,
    which nobody else may change.
    """
    packages = package_folders() if packages is None else packages
    home = _home(environment, cuda_major, packages, installed)
    links /= hashlib.sha256(str(home).encode()).hexdigest()[:16]
    headers = _linked_headers(home, packages, links / "include")
    libraries = _linked_libraries(home, packages, links / "lib")
    return Toolchain(home, headers, libraries)


def prepare_builds(environment: MutableMapping[str, str], cuda_major: int | None = None) -> str:
    """Set the variables for FlashInfer's builds in `environment`, the process's own; call it before
    FlashInfer is imported. Returns why no kernel can be built, or ""."""
    try:
        toolchain = find_toolchain(environment, cache_folder() / "cuda", cuda_major)
    except (ToolchainMissing, OSError) as error:
        return str(error)
    toolchain.set_in(environment)
    return ""


def compile_sample(environment: Mapping[str, str]) -> str:
    """Compile and link a small kernel as FlashInfer does. Returns "", or the compiler's error."""
    nvcc = Path(environment.get(HOME, "")) / "bin" / "nvcc"
    with tempfile.TemporaryDirectory(prefix="baton-cuda-") as folder:
        source, target = Path(folder, "sample.cu"), Path(folder, "sample.o")
        source.write_text(_SAMPLE)
        compiled = _run(
            [str(nvcc), "--compiler-options=-fPIC", "-c", str(source), "-o", str(target)],
            environment,
        )
        home = environment.get(HOME, "")
        paths = [f"-L{home}/lib64", f"-L{home}/lib64/stubs"]
        cxx = environment.get("CXX", "c++")
        library = str(Path(folder, "sample.so"))
        return compiled or _run(
            [cxx, str(target), "-shared", *paths, "-lcudart", "-lcuda", "-o", library], environment
        )


def first_error(output: str) -> str:
    """The line of a build's output that says what went wrong: one line, not empty."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reasons = (line for line in lines if _SAYS_WHY.search(line))
    return next(reasons, lines[0] if lines else "no output")


def package_folders() -> list[Path]:
    """The folders of NVIDIA's installed Python packages: nvidia/cu13, or nvidia/cuda_nvcc, ..."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [each for root in roots for each in sorted(Path(root).iterdir()) if each.is_dir()]


def _home(
    environment: Mapping[str, str],
    cuda_major: int | None,
    packages: Sequence[Path],
    installed: Path,
) -> Path:
    given = environment.get(HOME) or environment.get("CUDA_PATH")
    if given:
        if not _is_home(Path(given)):
            raise ToolchainMissing(
                f"{HOME} is {given}, where there is no bin/nvcc with its headers"
            )
        return Path(given)
    on_path = shutil.which("nvcc", path=environment.get("PATH", ""))
    candidates = [Path(on_path).resolve().parent.parent] if on_path else []
    homes = [each for each in (*candidates, installed, *packages) if _is_home(each)]
    if not homes:
        raise ToolchainMissing(
            "there is no CUDA compiler: install the CUDA toolkit, or the packages "
            "nvidia-cuda-nvcc, nvidia-cuda-runtime and nvidia-curand"
        )
    if cuda_major is None:
        return homes[0]
    return next((each for each in homes if _major(each) == cuda_major), homes[0])


def _is_home(folder: Path) -> bool:
    """Whether a folder has nvcc and the runtime's headers."""
    return os.access(folder / "bin/nvcc", os.X_OK) and (folder / "include/cuda_runtime.h").exists()


def _major(home: Path) -> int | None:
    """The major version of a folder's nvcc; None if it does not say."""
    try:
        said = subprocess.run(
            [str(home / "bin/nvcc"), "--version"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+)\.", said.stdout)
    return int(found[1]) if found else None


def _linked_headers(home: Path, packages: Sequence[Path], links: Path) -> Path | None:
    """A folder with cuRAND's headers, and nothing else that could hide a header of `home`; None if
    `home` has them."""
    if (home / "include/curand_kernel.h").exists():
        return None
    for package in packages:
        if (package / "include/curand_kernel.h").exists():
            for header in (package / "include").glob("curand*.h"):
                _link(links / header.name, header)
            return links
    raise ToolchainMissing(
        f"curand_kernel.h is neither in {home}/include nor in a package: install nvidia-curand "
        "(or libcurand-dev of the CUDA toolkit)"
    )


def _linked_libraries(home: Path, packages: Sequence[Path], links: Path) -> Path | None:
    """A folder with those of libcudart.so and libcuda.so that a linker would not find; None if it
    finds both."""
    known = (home / "lib64", home / "lib64/stubs", *_SYSTEM_LIBRARIES)
    missing = [name for name in ("libcudart.so", "libcuda.so") if not _first_with(known, name)]
    if "libcudart.so" in missing:
        folders = [home / "lib", *home.glob("targets/*/lib"), *(each / "lib" for each in packages)]
        runtime = next(
            (each for folder in folders for each in sorted(folder.glob("libcudart.so*"))), None
        )
        if runtime is None:
            raise ToolchainMissing(
                f"libcudart.so is neither in {home}/lib64 nor in a package: install "
                "nvidia-cuda-runtime (or cuda-cudart-dev of the CUDA toolkit)"
            )
        _link(links / "libcudart.so", runtime)
    if "libcuda.so" in missing:
        _make_stub(links / "libcuda.so", home / "include/cuda.h")
    return links if missing else None


def _first_with(folders: Iterable[Path], name: str) -> Path | None:
    return next((folder for folder in folders if (folder / name).exists()), None)


def _link(link: Path, target: Path) -> None:
    """Make `link` point to `target`; another process may do the same at the same time."""
    if link.is_symlink() and link.readlink() == target:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    partial = link.with_name(f"{link.name}.{os.getpid()}")
    partial.symlink_to(target)
    partial.replace(link)


def _make_stub(library: Path, header: Path) -> None:
    """Make a library with the name of the driver's library, and with empty versions of the
    functions that `header` declares. A program that is linked with it loads the real one,
    libcuda.so.1. Raises ToolchainMissing."""
    if library.exists():
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header.read_text(errors="replace"))))
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, built = Path(folder, "driver.c"), Path(folder, library.name)
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
        command = [os.environ.get("CXX", "c++"), "-x", "c", "-shared", "-fPIC", "-w", str(source)]
        error = _run([*command, "-Wl,-soname,libcuda.so.1", "-o", str(built)], os.environ)
        if error:
            raise ToolchainMissing(f"a C++ compiler is needed: {error}")
        built.replace(library)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a compiler; returns "" or its error in one line."""
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return first_error(done.stdout) if done.returncode else ""
