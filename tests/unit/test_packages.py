"""Packages of which we use more than their API accept no version that was not tested."""

from __future__ import annotations

import tomllib
from importlib.metadata import version

from packaging.requirements import Requirement

from tests.paths import ROOT

EXTENDED = "uvicorn"
"""`gateway.http.connection` subclasses its protocol and reads its request cycles."""


def test_what_we_extend_from_within_has_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {each.name: each for each in map(Requirement, project["dependencies"])}[EXTENDED]
    assert any(each.operator in ("<", "<=", "==") for each in found.specifier)
    assert found.specifier.contains(version(EXTENDED))
    major, minor, *_ = (int(part) for part in version(EXTENDED).split("."))
    assert not found.specifier.contains(f"{major}.{minor + 1}.0")
