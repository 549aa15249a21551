"""The wheel takes one name in an environment, and works beside packages that have our names."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["importlinter"]["root_packages"]
FOLDER = "baton_serve"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the wheel's files, and others of the same names beside them, which
    cannot be imported."""
    folder = tmp_path_factory.mktemp("site")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    Path(wheel).unlink()
    assert {path.name for path in folder.glob("*[!o]")} == {FOLDER}, "besides .dist-info"
    for name in {*PACKAGES, "demo_model"} - {FOLDER}:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('of another project')\n")
    return folder


def command(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`baton` as its entry point starts it, in an environment that finds the folder first."""
    environ = {**os.environ, "PYTHONPATH": str(site)}
    code = "import sys, baton_serve.command as c; sys.exit(c.main())"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        env=environ, cwd=site.parent, capture_output=True, text=True, timeout=250,
    )  # fmt: skip


def test_every_file_of_the_packages_is_in_the_wheel(site: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", *PACKAGES, "demo_model"], cwd=ROOT, check=True, capture_output=True,
        text=True,
    )  # fmt: skip
    ours = {each.removeprefix(f"{FOLDER}/") for each in listed.stdout.splitlines()}
    assert len(ours) > 500
    folder = site / FOLDER
    files = (
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    assert {str(path.relative_to(folder)) for path in files} == ours


def test_commands_start_beside_packages_of_their_names(site: Path) -> None:
    listed = command(site, "bench")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "  chaos " in listed.stdout
    helped = command(site, "bench", "router", "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "--decision" in helped.stdout


@pytest.mark.nightly
def test_a_whole_fleet_starts_beside_packages_of_its_names(site: Path) -> None:
    """The benchmark starts `baton up`, whose processes are children of another `baton`."""
    done = command(site, "bench", "sockets")
    assert done.returncode == 0, done.stdout + done.stderr
