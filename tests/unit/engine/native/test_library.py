"""Building the kernels: cached, atomic, and plainly refused where they cannot be had."""

from __future__ import annotations

import ctypes
import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine import loader
from engine.attention.cpu_attention import KernelAttention
from engine.attention.torch_attention import TorchAttention
from engine.engine_config import EngineConfig
from engine.loader import load_engine
from engine.native import library
from engine.native.library import KernelsUnavailable
from process.cores import can_keep_to_cores, keep_to_cores, usable_cores
from protocol.errors import ConfigError
from scheduling.scheduler import SchedulerConfig


def build() -> ctypes.CDLL:
    """Past the cache within the process."""
    return library.load_library.__wrapped__("generic")


FUNCTIONS = (
    *("attention", "plan", "rms_norm", "rotate", "gate"),
    *("largest", "linear", "experts", "layers"),
    *("rank_sum", "rank_share", "rank_gather"),
    *("stop_ranks", "stage_send", "stage_receive"),
)


@pytest.fixture
def cache(tmp_path, monkeypatch, kernels) -> Path:
    """An empty cache of kernels, whose sources are two files that compile in no time."""
    sources = tmp_path / "sources"
    sources.mkdir()
    stubs = [f'extern "C" void baton_{name}(void*) {{}}' for name in FUNCTIONS]
    (sources / "stubs.cpp").write_text("\n".join(stubs))
    (sources / "more.cpp").write_text(
        'extern "C" void baton_step(void*) {}\nextern "C" int baton_has_linear() { return 1; }'
    )
    monkeypatch.setattr(library, "SOURCES", sources)
    monkeypatch.setattr(library, "_COMPILE_FLAGS", ("-fPIC",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "baton" / "kernels"


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """Nor a cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


def test_builds_at_once_and_later_ones_compile_once(cache, monkeypatch):
    compiled = []
    real = library.compile_objects
    monkeypatch.setattr(
        library, "compile_objects", lambda *args: compiled.append(args) or real(*args)
    )
    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(build) for _ in range(3)]:
            done.result()
    (built,) = cache.iterdir()
    before = built.stat()
    build()
    assert list(cache.iterdir()) == [built]
    assert built.stat().st_ino == before.st_ino
    assert len(compiled) == 1


@pytest.mark.skipif(not can_keep_to_cores(), reason="nothing keeps to cores here")
def test_compilers_use_the_cores_that_their_process_keeps_off(cache, tmp_path, monkeypatch):
    """Each runs on all, all sources are compiled, and the process keeps to its own."""
    seen, compiler = tmp_path / "seen", tmp_path / "counting-c++"
    compiler.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *" -c "*) nproc >> {seen};; esac\n'
        f'exec {library.find_compiler()} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))

    def build_on_one_core() -> list[int]:
        keep_to_cores(usable_cores()[:1])
        build()
        return usable_cores()

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(build_on_one_core).result() == usable_cores()[:1]
    sources = list(library.SOURCES.glob("*.cpp"))
    assert seen.read_text().split() == [str(len(usable_cores()))] * len(sources)


def test_what_a_killed_build_left_is_removed(cache):
    left = cache / "build-of-the-dead"
    left.mkdir(parents=True)
    (left / "kernels.o").touch()
    build()
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_a_compiler_that_fails_is_quoted(cache, tmp_path, monkeypatch):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho no such flag >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(KernelsUnavailable, match="no such flag"):
        build()
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file, not a folder")
    with pytest.raises(KernelsUnavailable, match="kernels"):
        build()


def test_no_compiler_is_said(no_compiler):
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        build()


@pytest.fixture
def broken_compiler(monkeypatch, tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\nexit 1\n")
    compiler.chmod(0o755)

    def break_it() -> None:
        monkeypatch.setenv("CXX", str(compiler))

    return break_it


def test_a_warm_cache_needs_no_compiler(cache, monkeypatch, tmp_path, broken_compiler):
    build()
    (built,) = cache.iterdir()
    broken_compiler()
    assert build().baton_has_linear() == 1
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX")
    assert build().baton_has_linear() == 1
    assert list(cache.iterdir()) == [built]


def test_a_cache_of_other_sources_is_not_used(cache, monkeypatch, tmp_path):
    build()
    with (library.SOURCES / "stubs.cpp").open("a") as source:
        source.write("\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        build()


def test_kernels_built_ahead_need_neither_compiler_nor_cache(cache, monkeypatch, tmp_path, caplog):
    """On a CPU that has more, the best that were built are used, and the log says so."""
    ahead = tmp_path / "ahead"
    built = {name: library.build_library(name, ahead) for name in ("generic", "avx2")}
    assert {*built["generic"], *built["avx2"]} == set(ahead.iterdir())
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(library, "_good_instruction_sets", lambda: ["avx512", "avx2", "generic"])
    loaded = library.load_library.__wrapped__(prebuilt=ahead)
    assert loaded._name == str(built["avx2"][0])
    assert "kernels for avx2 are used, slower than those for avx512: there is no C++" in caplog.text
    assert not cache.exists()


def load(folder: Path, attention: str, dtype: str = "auto") -> loader.LoadedEngine:
    scheduler = SchedulerConfig(block_size=16)
    config = EngineConfig(folder, scheduler, dtype, "cpu", num_blocks=8, attention=attention)
    return load_engine(config, lambda: 0.0)


def test_auto_without_a_compiler_runs_torch_and_says_so(make_tiny, no_compiler, caplog):
    with caplog.at_level(logging.WARNING):
        load(make_tiny().folder, "auto").engine.warm_up()
    assert "torch computes attention" in caplog.text
    assert "no C++ compiler" in caplog.text


def test_kernel_without_a_compiler_is_refused(make_tiny, no_compiler):
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        load(make_tiny().folder, "kernel")


def test_kernel_refuses_a_dtype_that_it_does_not_have(make_tiny, kernels):
    with pytest.raises(ConfigError, match="float16"):
        load(make_tiny(dtype=torch.float16).folder, "kernel")


@pytest.mark.parametrize(
    ("attention", "expected"),
    [("torch", TorchAttention), ("kernel", KernelAttention), ("auto", KernelAttention)],
)
def test_every_choice_runs(make_tiny, kernels, monkeypatch, attention, expected):
    ran = set()
    for backend in (TorchAttention, KernelAttention):

        def plan(self, segments, backend=backend, real=backend.plan):
            ran.add(backend)
            real(self, segments)

        monkeypatch.setattr(backend, "plan", plan)
    load(make_tiny(dtype=torch.bfloat16).folder, attention).engine.warm_up()
    assert ran == {expected}


@pytest.fixture
def newest_cpu(monkeypatch):
    """newest_cpu(vendor) makes this machine's CPU one of theirs that has all instructions."""

    def pretend(vendor: str) -> None:
        flags = " ".join(set().union(*library.INSTRUCTION_SETS.values()))
        fields = {"vendor_id": vendor, "flags": flags}
        monkeypatch.setattr(library, "_cpu", fields.__getitem__)

    return pretend


@pytest.mark.parametrize(
    ("vendor", "without_tiles"), [("AuthenticAMD", "avx512_bf16"), ("GenuineIntel", "avx512")]
)
def test_what_linux_does_not_allow_is_not_chosen(monkeypatch, newest_cpu, vendor, without_tiles):
    """Nor dot products where they are the slower way to multiply."""
    newest_cpu(vendor)
    monkeypatch.setattr(library, "_may_use_tiles", lambda: False)
    assert library.best_instruction_set() == without_tiles
    with pytest.raises(KernelsUnavailable, match="AMX"):
        library.load_library.__wrapped__("amx_bf16")
    monkeypatch.setattr(library, "_may_use_tiles", lambda: True)
    assert library.best_instruction_set() == "amx_bf16"


def test_a_compiler_without_amx_builds_what_it_can(
    cache, tmp_path, monkeypatch, caplog, newest_cpu
):
    """It says so; with one that can do nothing, what is quoted is about the best."""
    newest_cpu("GenuineIntel")
    monkeypatch.setattr(library, "_may_use_tiles", lambda: True)
    real = library.find_compiler()
    old = tmp_path / "old-c++"
    old.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-mamx*) echo "unknown option -mamx-bf16" >&2; exit 1;; esac\n'
        f'exec {real} "$@"\n'
    )
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    assert library.load_library.__wrapped__().baton_has_linear()
    assert "unknown option -mamx-bf16" in caplog.text
    old.write_text('#!/bin/sh\necho "no $*" >&2; exit 1\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    with pytest.raises(KernelsUnavailable, match="no "):
        library.load_library.__wrapped__()


def test_a_library_that_others_may_write_to_is_not_loaded(cache):
    build()
    for path in cache.glob("*.so"):
        path.chmod(0o666)
    with pytest.raises(KernelsUnavailable, match="others may write to"):
        build()
