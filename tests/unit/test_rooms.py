"""The rooms: no circle of imports, none too large, and what decides needs no torch or sockets."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PYPROJECT["tool"]["importlinter"]["root_packages"]
MOST_FILES = 22
PURE = [
    "scheduling.scheduler",
    "router.routing.policy",
    "router.requests.machine.generation",
    "kv_transfer.handoff.sink",
    "kv_transfer.handoff.source",
]
UNIMPORTABLE = ["torch", "transformers", "zmq", "asyncio", "socket", "threading", "llguidance"]


def modules() -> dict[str, Path]:
    """Every module of the product by its name; a package's is that of its `__init__`."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    return {name.removesuffix(".__init__"): path for name, path in zip(names, files, strict=True)}


def imported(tree: ast.AST) -> Iterator[str]:
    """Names that a module imports, at its top, in functions, or for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{each.name}" for each in node.names)


def imports_of(known: dict[str, Path]) -> dict[str, set[str]]:
    """The modules that each imports; a name inside a module counts as the module."""
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        found[module] = set()
        for name in imported(ast.parse(path.read_text())):
            while name and name not in known:
                name = name.rpartition(".")[0]
            found[module] |= {name} - {"", module}
    return found


def circles(graph: dict[str, set[str]]) -> list[str]:
    """What is left once every module that imports none of the rest is taken away, again and
    again: the modules of circles, and those that lie between them."""
    left = {module: set(targets) for module, targets in graph.items()}
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    imported_by_left = {target for targets in left.values() for target in targets}
    return sorted(left.keys() & imported_by_left)


def test_no_circle_of_imports_between_files() -> None:
    graph = imports_of(modules())
    assert len(graph) > 300
    assert circles(graph) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]


def test_no_folder_has_too_many_files() -> None:
    folders: dict[Path, int] = {}
    for path in modules().values():
        folders[path.parent] = folders.get(path.parent, 0) + 1
    assert {str(f): n for f, n in folders.items() if n > MOST_FILES} == {}


def test_every_package_says_what_it_owns_and_what_it_may_import() -> None:
    silent = []
    for name, path in modules().items():
        if path.name == "__init__.py":
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            if "mports" not in text:
                silent.append(name)
    assert silent == []


@pytest.mark.parametrize("module", PURE)
def test_what_decides_runs_without_torch_and_sockets(module: str) -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({UNIMPORTABLE})); import {module}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
