"""For every test: hypothesis draws the same examples each time, however slow the machine is, an
assertion that fails in a helper shows its values, and tests of `./scripts/nightly` wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import logging
import os
import ssl
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import certifi
import pytest
import uvloop
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from engine.native.library import best_instruction_set
from process.openmp import prepare_openmp
from tests.effort import NIGHTLY, times
from tests.paths import ROOT
from tests.scopes import Groups, group_of, order_of

prepare_openmp()  # as in every process of Baton, before torch is imported
pytest.register_assert_rewrite("tests.browser", "tests.faults", "tests.integration", "tests.unit")
settings.register_profile(
    "baton", max_examples=times(20, 100), deadline=None, derandomize=True, print_blob=True
)
settings.load_profile("baton")
if not NIGHTLY:  # hypothesis would read all our modules, and draw numbers that occur in them
    providers.is_local_module_file = lambda path: False

DEPRECATIONS = ("DeprecationWarning", "FutureWarning", "PendingDeprecationWarning")


def share_the_known_authorities() -> None:
    """Let HTTP clients share the certificate authorities, those of certifi or `SSL_CERT_FILE`.
    Otherwise each client would read all of them, which takes 20 ms."""
    make = ssl.create_default_context
    known = functools.cache(lambda path: make(cafile=path))

    def create_default_context(*arguments: Any, **named: Any) -> ssl.SSLContext:
        path = named.get("cafile")
        is_known = path in (certifi.where(), os.environ.get("SSL_CERT_FILE"))
        if not arguments and set(named) == {"cafile"} and path is not None and is_known:
            return known(path)
        return make(*arguments, **named)

    ssl.create_default_context = create_default_context


share_the_known_authorities()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deprecations-are-errors",
        action="store_true",
        help="fail where our own code calls what another package has deprecated",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--deprecations-are-errors"):
        pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
        packages = "|".join([*pyproject["tool"]["importlinter"]["root_packages"], "tests"])
        for category in DEPRECATIONS:
            config.addinivalue_line("filterwarnings", rf"error::{category}:({packages})(\..*)?")


def pytest_report_header() -> str:
    """The kernels' instruction set, which affects the time of the suite most."""
    return f"instruction set: {best_instruction_set()}"


def pytest_collection(session: pytest.Session) -> None:
    """Each of several processes imports all test files before it collects them, and each begins at
    another file. So it finds files that another process has already compiled: compiling a file with
    rewritten assertions takes longer than importing it. The garbage collector is off until all
    tests are collected, because hardly anything becomes garbage."""
    if session.config.getoption("dist", "no") != "no":
        return  # other processes collect
    gc.disable()
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != session.config.getini("testpaths"):
        return
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    first = int(worker["workerid"].removeprefix("gw")) * len(files) // worker["workercount"]
    for file in files[first:] + files[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it says why
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody calls it
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups | None:
    """Decide which test runs in which process."""
    return Groups(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        begins = order_of(item.nodeid for item in items)
        items.sort(key=lambda item: begins[group_of(item.nodeid)])
    if NIGHTLY:
        return
    waiting = [item for item in items if item.get_closest_marker("nightly")]
    if waiting:
        config.hook.pytest_deselected(items=waiting)
        items[:] = [item for item in items if item not in set(waiting)]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the router's event loop, because its errors differ from those of asyncio's own
    loop."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_finish() -> None:
    """Exclude everything that is imported by now from garbage collection, because it stays to the
    end."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def the_root_logger_stays_as_it_is() -> Iterator[None]:
    """Restore the root logger after each test. A command that runs in the test's process sets the
    level and handlers, and its handler writes to a file that is removed with the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
