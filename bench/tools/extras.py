"""Packages that only benchmarks need: a missing one is named, with the command that installs it."""

from __future__ import annotations


def missing_extra(error: ModuleNotFoundError) -> SystemExit:
    """What ends a benchmark whose package is not installed: one line on standard error."""
    return SystemExit(f"this benchmark needs {error.name}: pip install --editable '.[bench]'")
