"""The `baton` command's own words; and which settings it lets pass to which process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from cli import __main__ as start
from cli.commands import COMMANDS, settings_classes
from cli.main import main
from process.openmp import SPINS
from process.settings import SECTIONS
from process.settings.spec import specs_of
from tests.paths import ROOT


@pytest.mark.parametrize("argv", [[], ["help"], ["--help"], ["-h"]])
def test_overview(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ("up", "router", "prefill", "decode", "status"))


def run_into(stdout: int, unbuffered: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", "help"]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(
        command, cwd=ROOT, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_nothing_to_report(unbuffered: str) -> None:
    """As of `baton help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = run_into(writer, unbuffered)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_output_may_be_closed_from_the_start() -> None:
    """As with `baton help >&-`."""
    code = "import os, sys; os.close(1); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", code, sys.executable, "-m", "cli.main", "help"]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", [*COMMANDS, "help"])
def test_sigterm_is_success_only_for_what_serves(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "argv", ["baton", name, "--log-level", "info"])
    start._end(signal.SIGTERM, None)
    assert ended == [0 if name in ("up", "router", "prefill", "decode", "store") else 143]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line(unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        done = run_into(full.fileno(), unbuffered)
    told = "baton: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_an_error_of_another_file_is_not_taken_for_one_of_the_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def main_of(command: object) -> object:
        raise OSError(errno.ENOSPC, "of another disk")

    monkeypatch.setattr("cli.commands.Command.load_main", main_of)
    with pytest.raises(OSError, match="of another disk"):
        main(["status"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("baton ")


def test_commands_start_with_openmp_told_to_sleep() -> None:
    """What only holds if it is said before anything has imported torch."""
    code = (
        "import os, sys, cli.commands; from cli.main import main\n"
        "said = lambda argv: print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules) or 0\n"
        "cli.commands.Command.load_main = lambda self: said\n"
        "sys.exit(main(['decode']))"
    )
    told = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in told}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [str(SPINS), "False"], done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["upp"], "'upp' is not a command; did you mean up?"),
        (["xyz"], "commands: up, router, prefill, decode, status"),
        (["--frob"], "'--frob' is not a command"),
        (["help", "upp"], "did you mean up?"),
    ],
)
def test_an_unknown_command(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_explains_its_settings(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as done:
        main(["help", name])
    assert done.value.code == 0
    out = capsys.readouterr().out
    for spec in specs_of(COMMANDS[name].load_settings_class()).values():
        assert spec.env_name in out


def test_names_of_other_processes_pass_and_wrong_ones_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_GRANT_TTL_MS", "not judged here")
    assert main(["status", "--router-url=http://127.0.0.1:1"]) == 1
    assert "no router answers at http://127.0.0.1:1/fleet" in capsys.readouterr().err
    monkeypatch.setenv("BATON_GRANT_TTL", "1")
    with pytest.raises(SystemExit) as done:
        main(["status"])
    assert done.value.code == 2
    assert "environment BATON_GRANT_TTL: unknown" in capsys.readouterr().err


def test_every_command_has_its_table_in_the_file() -> None:
    assert set(COMMANDS) <= set(SECTIONS)


def test_the_command_and_all_settings_load_without_torch() -> None:
    code = "import sys, cli.main as m; m.settings_classes(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_one_name_means_one_thing() -> None:
    """A variable that several processes read has the same type and unit in each."""
    seen: dict[str, tuple[type, str]] = {}
    for cls in settings_classes():
        for spec in specs_of(cls).values():
            kind = (spec.base, spec.details.unit)
            assert seen.setdefault(spec.env_name, kind) == kind, spec.env_name
