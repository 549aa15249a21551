"""`baton fetch`: reports the folder, and stays until it is told to go."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.main import main
from tests.paths import ROOT


def test_a_model_that_is_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", f"--model={tmp_path}", f"--ready-file={tmp_path}/ready"]) == 0
    assert f"is in {tmp_path}" in capsys.readouterr().out
    assert (tmp_path / "ready").exists()


def test_a_model_that_cannot_be_had_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["fetch", f"--model={tmp_path}/missing", f"--ready-file={tmp_path}/ready"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "ready").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_stays_until_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cli.main", "fetch", f"--model={tmp_path}", "--stay"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(str(tmp_path))
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
