"""No bound of a dependency admits a version with a public advisory, as far as the list knows."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.paths import ROOT

LISTED = tomllib.loads((ROOT / "tests/advisories.toml").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIRED = [
    Requirement(text)
    for texts in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in texts
]


@pytest.mark.parametrize("name", LISTED["python"])
def test_bounds_are_above_the_advisories(name: str) -> None:
    fixed = Version(LISTED["python"][name]["fixed"])
    bounds = [each.specifier for each in REQUIRED if each.name == name]
    assert bounds, f"{name} is no dependency any more: take it off the list"
    for bound in bounds:
        lowest = [Version(each.version) for each in bound if each.operator in (">=", "==", "~=")]
        assert max(lowest, default=Version("0")) >= fixed
    pinned = re.search(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is None or Version(pinned[1]) >= fixed


def test_the_vendored_library_has_no_advisory() -> None:
    """Preact of 10.26.5 and later lost the strict check of `constructor`, until it was mended."""
    folder = ROOT / "console/dashboard/vendor"
    named = re.search(r"Preact (\d+\.\d+\.\d+) ", (folder / "README.md").read_text("utf-8"))
    listed = LISTED["npm"]["preact"]
    assert named is not None
    assert not Version(listed["introduced"]) <= Version(named[1]) < Version(listed["fixed"])
    code = (folder / "htm-preact.js").read_text(encoding="utf-8")
    assert re.search(r"void 0!==\w+\.constructor|\w+\.constructor!==void 0", code)
