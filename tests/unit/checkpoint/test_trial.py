"""A child that fails in any way is one error, of one line, that names the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkpoint import trial
from checkpoint.trial import start_trial
from protocol.error_line import one_line
from protocol.errors import ModelLoadError

CHILD = "tests.unit.checkpoint.crashing_trial"


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("grows", "takes more memory to read than"),
        ("aborts", "file cannot be read, perhaps for lack of memory"),
        ("exits", "file cannot be read: the attempt ended with status 3"),
        ("raises", r"raises: a b\\x1b\[2J$"),
        ("panics", r"file cannot be read \(BaseException: a b\)"),
        ("recurses", "file is nested too deeply"),
    ],
)
def test_a_child_s_end_is_one_line(tmp_path: Path, ending: str, message: str) -> None:
    child = start_trial(CHILD, tmp_path / ending)
    with pytest.raises(ModelLoadError, match=message) as raised:
        child.finish()
    assert str(raised.value).isprintable()
    assert str(tmp_path) in str(raised.value)
    assert ended(child.process.pid)


def test_a_child_that_is_well_is_no_error(tmp_path: Path) -> None:
    start_trial(CHILD, tmp_path / "is well").finish()


@pytest.mark.parametrize("ending", ["loops", "sleeps"])
def test_a_child_without_end_is_killed(tmp_path: Path, ending: str) -> None:
    child = start_trial(CHILD, tmp_path / ending)
    with pytest.raises(ModelLoadError, match=r"file takes more than 10 s to read|takes more than"):
        child.finish(wall_limit_s=1.5)
    assert ended(child.process.pid)


@pytest.mark.nightly
def test_a_child_that_computes_without_end_is_killed_by_the_system(tmp_path: Path) -> None:
    child = start_trial(CHILD, tmp_path / "loops")
    with pytest.raises(ModelLoadError, match="file takes more than 10 s to read"):
        child.finish()
    assert trial.CPU_LIMIT_S == 10


def test_a_cancelled_child_is_killed(tmp_path: Path) -> None:
    child = start_trial(CHILD, tmp_path / "sleeps")
    child.cancel()
    child.cancel()
    assert ended(child.process.pid)


def test_the_child_knows_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "x" * 32)
    with pytest.raises(ModelLoadError, match=r"tells: \[\]"):
        start_trial(CHILD, tmp_path / "tells").finish()
    assert os.environ["BATON_CLUSTER_SECRET"]


def test_a_line_is_bounded_and_has_no_control_characters() -> None:
    assert one_line("a\r\n b\t\x00\x1b[31mé") == "a b \\x00\\x1b[31mé"
    assert len(one_line("x" * 10**6)) < 2100
