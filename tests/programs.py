"""Programs of the distribution's packages, which the scripts unpack into the environment."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest


def find_program(name: str, package: str) -> str:
    """The program's path. Skips the test if it is not installed; in continuous integration the
    test fails."""
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    found = shutil.which(name, path=places)
    if found is None:
        reason = f"no {name}: install Debian's package `{package}`"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found
