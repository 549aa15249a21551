"""CUDA's compiler, headers and libraries, found in folders as installers and packages lay them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.gpu import toolchain
from engine.gpu.toolchain import (
    Toolchain,
    ToolchainMissing,
    compile_sample,
    find_toolchain,
    first_error,
)

NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release {version}.2"; exit; fi
{compile}
"""


def install(
    folder: Path, version: int = 13, compile: str = "exit 0", libraries: str = "lib64"
) -> Path:
    """A CUDA_HOME with a compiler that runs a shell's line, headers, and a runtime to link with."""
    for name in ("bin", "include", libraries):
        (folder / name).mkdir(parents=True, exist_ok=True)
    nvcc = folder / "bin/nvcc"
    nvcc.write_text(NVCC.format(version=version, compile=compile))
    nvcc.chmod(0o755)
    (folder / "include/cuda_runtime.h").touch()
    (folder / "include/cuda.h").write_text("CUresult cuInit(unsigned flags);\n")
    (folder / libraries / ("libcudart.so" if libraries == "lib64" else "libcudart.so.13")).touch()
    return folder


def curand(folder: Path) -> Path:
    """A package with cuRAND's headers, and others that must not hide those of another version."""
    (folder / "include").mkdir(parents=True, exist_ok=True)
    for name in ("curand_kernel.h", "curand_philox4x32_x.h", "cuda_fp16.h"):
        (folder / "include" / name).touch()
    return folder


@pytest.fixture(autouse=True)
def no_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_SYSTEM_LIBRARIES", ())


def find(tmp_path: Path, environment: dict[str, str], *packages: Path, **more: object) -> Toolchain:
    arguments = {"installed": tmp_path / "none"} | more
    return find_toolchain(environment, tmp_path / "links", packages=packages, **arguments)


def test_packages_are_a_toolchain(tmp_path: Path) -> None:
    package = curand(install(tmp_path / "nvidia/cu13", libraries="lib"))
    found = find(tmp_path, {}, package)
    assert (found.home, found.headers) == (package, None)
    assert found.libraries is not None
    assert (found.libraries / "libcudart.so").resolve() == package / "lib/libcudart.so.13"
    environment = {"LIBRARY_PATH": "/mine"}
    found.set_in(environment)
    found.set_in(environment)
    assert environment == {
        "CUDA_HOME": str(package),
        "LIBRARY_PATH": f"{found.libraries}:/mine",
    }


def test_a_toolkit_without_curand_takes_its_headers_alone_from_a_package(tmp_path: Path) -> None:
    home, package = install(tmp_path / "cuda"), curand(tmp_path / "nvidia/cu13")
    found = find(tmp_path, {"CUDA_HOME": str(home)}, package)
    assert found.headers is not None
    names = sorted(each.name for each in found.headers.iterdir())
    assert names == ["curand_kernel.h", "curand_philox4x32_x.h"]
    moved = curand(tmp_path / "other/cu13")  # another environment on the same machine
    again = find(tmp_path, {"CUDA_HOME": str(home)}, moved)
    assert again.headers == found.headers
    for name in names:
        assert (again.headers / name).resolve() == moved / "include" / name
    environment: dict[str, str] = {}
    found.set_in(environment)
    assert environment["CPATH"] == str(found.headers)


def test_the_drivers_stand_in_has_the_functions_of_the_header(tmp_path: Path) -> None:
    found = find(tmp_path, {"CUDA_HOME": str(curand(install(tmp_path / "cuda")))})
    assert found.libraries is not None
    stub = found.libraries / "libcuda.so"
    source = tmp_path / "uses.c"
    source.write_text("int cuInit(unsigned); int use(void) { return cuInit(0); }")
    library = tmp_path / "uses.so"
    command = ["c++", "-x", "c", str(source), "-shared", "-fPIC", "-Wl,--as-needed"]
    subprocess.run([*command, f"-L{stub.parent}", "-lcuda", "-o", str(library)], check=True)
    assert b"libcuda.so.1\0" in library.read_bytes()


@pytest.mark.parametrize(("major", "home"), [(13, "b"), (12, "a"), (None, "a"), (11, "a")])
def test_the_compiler_of_torchs_version_is_preferred(
    tmp_path: Path, major: int | None, home: str
) -> None:
    homes = [curand(install(tmp_path / name, int(v))) for name, v in (("a", "12"), ("b", "13"))]
    assert find(tmp_path, {}, *homes, cuda_major=major).home == tmp_path / home


def test_a_script_on_the_path_is_no_home(tmp_path: Path) -> None:
    script = tmp_path / "local/bin/nvcc"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    installed = curand(install(tmp_path / "cuda"))
    found = find(tmp_path, {"PATH": str(script.parent)}, installed=installed)
    assert found.home == installed


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ("bin/nvcc", "no CUDA compiler: install .*nvidia-cuda-nvcc"),
        ("include/curand_kernel.h", "curand_kernel.h is neither .*: install nvidia-curand"),
        ("lib/libcudart.so.13", "libcudart.so is neither .*: install nvidia-cuda-runtime"),
    ],
)
def test_what_is_missing_is_named_with_its_package(tmp_path: Path, lacks: str, says: str) -> None:
    package = curand(install(tmp_path / "nvidia/cu13", libraries="lib"))
    (package / lacks).unlink()
    with pytest.raises(ToolchainMissing, match=says):
        find(tmp_path, {}, package)


def test_a_cuda_home_without_a_compiler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolchainMissing, match="CUDA_HOME is /nowhere"):
        find(tmp_path, {"CUDA_HOME": "/nowhere"}, curand(install(tmp_path / "nvidia/cu13")))


def test_the_sample_tells_the_compilers_first_error(tmp_path: Path) -> None:
    says = "echo 'a.cu:3:10: fatal error: curand_kernel.h: No such file' >&2; exit 1"
    home = install(tmp_path / "cuda", compile=says)
    environment = dict(os.environ) | {"CUDA_HOME": str(home)}
    assert compile_sample(environment) == "a.cu:3:10: fatal error: curand_kernel.h: No such file"
    assert "nvcc" in compile_sample({"CUDA_HOME": str(tmp_path)})


def test_the_sample_tells_the_linkers_error(tmp_path: Path) -> None:
    cc = shutil.which("c++")
    compiles = (
        f"for last; do :; done; echo 'int f(){{return 0;}}' | {cc} -x c++ -fPIC -c - -o $last"
    )
    home = install(tmp_path / "cuda", compile=compiles)
    (home / "lib64/libcudart.so").unlink()
    environment = dict(os.environ) | {"CUDA_HOME": str(home)}
    assert "-lcudart" in compile_sample(environment)


def test_the_first_error_is_one_line() -> None:
    assert first_error("x\nld: cannot find -lcuda\nld: error: y") == "ld: cannot find -lcuda"
    assert first_error("only this\nand that") == "only this"
    assert first_error("") == "no output"
