"""`baton bench NAME`: runs a benchmark, as `python -m bench.NAME` does in a checkout."""

from __future__ import annotations

import ast
import difflib
import os
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import bench
from cli.child import baton_environment
from protocol.errors import ConfigError

_HELP = ("-h", "--help")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """`baton bench` has no settings: each benchmark has flags of its own."""


def main(argv: Sequence[str]) -> int:
    """Run the named benchmark with the rest of the arguments; without a name, list them all.
    Returns its exit status. Raises ConfigError for an unknown name, SystemExit for the list."""
    found = benchmarks()
    if not argv or argv[0] in _HELP:
        width = max(map(len, found))
        print("usage: baton bench NAME [FLAGS]     (baton bench NAME --help explains its flags)\n")
        print("\n".join(f"  {name:<{width}}  {question}" for name, question in found.items()))
        raise SystemExit(0)
    name, *rest = argv
    if name not in found:
        close = difflib.get_close_matches(name, found, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(found)}"
        raise ConfigError(f"{name!r} is not a benchmark; {hint}")
    sys.argv = [f"baton bench {name}", *rest]
    os.environ.update(baton_environment(os.environ))  # for the processes that it starts
    try:
        runpy.run_module(f"bench.{name}", run_name="__main__")
    except SystemExit as ending:
        return _status_of(ending)
    return 0


def benchmarks() -> dict[str, str]:
    """Every benchmark, with the first sentence of its documentation."""
    folder = Path(bench.__file__).parent
    named = {path.stem: path for path in folder.glob("[a-z]*.py")}
    named |= {
        path.parent.name: path.with_name("__init__.py") for path in folder.glob("*/__main__.py")
    }
    return {name: _first_line(named[name]) for name in sorted(named)}


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.sub(r"(: `python -m [\w.]+`)?\.$", "", text.partition("\n")[0])


def _status_of(ending: SystemExit) -> int:
    if isinstance(ending.code, str):
        print(ending.code, file=sys.stderr)
        return 1
    return int(ending.code or 0)
