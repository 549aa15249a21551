"""The `baton` command: puts the folder of Baton's packages on the import path, and runs it."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run one command of `baton`; returns its exit status."""
    here = Path(__file__).resolve().parent
    packages = here if (here / "cli").is_dir() else here.parent
    sys.path.insert(0, str(packages))
    from cli.__main__ import main as run

    return run()
