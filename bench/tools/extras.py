"""Names a missing package that only benchmarks need, with the command that installs it."""

from __future__ import annotations


def missing_extra(error: ModuleNotFoundError) -> SystemExit:
    """The SystemExit for a missing package: one line on standard error."""
    return SystemExit(f"this benchmark needs {error.name}: pip install --editable '.[bench]'")
