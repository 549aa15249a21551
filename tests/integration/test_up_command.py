"""`baton up` and the demo as an operator runs them: processes, signals, exit codes, leftovers.

Where the start of new programs is not what is tested, processes are forked.
"""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from checkpoint.model_source import resolve_model
from cli.demo import NO_PACKAGE, OVER_NIXL
from cli.demo import main as demo
from cli.main import main as baton
from gateway.http.server import listen
from process.cores import can_keep_to_cores, usable_cores
from process.open_files import MOST_FILES
from tests.effort import some
from tests.forked import ForkedChildren, fork_context, run_up
from tests.gguf_files import smollm2
from tests.http_client import HTTP
from tests.integration.fleets import assert_no_other_processes, our_processes
from tests.integration.reference import DEMO_MODEL

Main = Callable[[list[str]], int]
Run = Callable[..., subprocess.CompletedProcess[str]]
ROOT = DEMO_MODEL.parent
WAIT_S = 120.0
SMALL = ("--port=0", "--num-blocks=512", "--torch-threads=1", "--device=cpu")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def environment(temp_dir: Path) -> dict[str, str]:
    """Ours, without settings of Baton, and with temporary files where the test sees them."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("BATON_")}
    return {**kept, "TMPDIR": str(temp_dir)}


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs a main in this process, without settings of Baton, and with temporary files where the
    test sees them."""
    fork_context()  # whose own temporary files stay
    for name in [each for each in os.environ if each.startswith("BATON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for module in ("cli.fleet", "cli.up"):
        monkeypatch.setattr(f"{module}.ChildSettings", ForkedChildren)

    def run(main: Main, *arguments: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        status = main([*arguments])
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return run


class Up:
    """A running `baton up`: what it printed, where it serves, what it started."""

    def __init__(self, pid: int, output: Iterable[str]) -> None:
        self.printed = ""
        for line in output:
            self.printed += line
            if line.startswith("Ctrl-C"):
                break
        assert "Ctrl-C" in self.printed, self.printed
        router = next(line for line in self.printed.splitlines() if line.startswith("router"))
        self.url = router.split()[1].removesuffix("/v1")
        self.children = psutil.Process(pid).children(recursive=True)

    def assert_all_gone(self) -> None:
        _, alive = psutil.wait_procs(self.children, timeout=60)
        assert not alive, "a process was left behind"


@contextmanager
def running_up(temp_dir: Path) -> Iterator[tuple[Up, subprocess.Popen[str]]]:
    with subprocess.Popen(
        command("cli.main", "up", "--model", str(DEMO_MODEL), *SMALL),
        cwd=ROOT,
        env=environment(temp_dir),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield Up(process.pid, process.stdout), process
        finally:
            process.kill()


@contextmanager
def forked_up(temp_dir: Path, *flags: str) -> Iterator[tuple[Up, BaseProcess]]:
    """As above, with forked processes."""
    ours, theirs = fork_context().Pipe(duplex=False)
    arguments = ["--model", str(DEMO_MODEL), *SMALL, *flags]
    process = fork_context().Process(target=run_up, args=(arguments, environment(temp_dir), theirs))
    process.start()
    theirs.close()
    try:
        with open(os.dup(ours.fileno())) as output:
            assert process.pid is not None
            yield Up(process.pid, output), process
    finally:
        ours.close()
        process.kill()
        process.join(WAIT_S)


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], 1))
def test_up_serves_until_a_signal_and_leaves_nothing(
    tmp_path: Path, run_here: Run, number: signal.Signals
) -> None:
    with running_up(tmp_path) as (up, process):
        assert_workers_are_kept_apart(up)
        answer = HTTP.post(
            f"{up.url}/v1/chat/completions",
            json={"model": DEMO_MODEL.name, "messages": [{"role": "user", "content": "What?"}]},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]

        status = run_here(baton, "status", "--router-url", up.url, "--json")
        assert status.returncode == 0, status.stderr
        rows = {row["worker_id"]: row for row in json.loads(status.stdout)["workers"]}
        assert {name: row["state"] for name, row in rows.items()} == {
            "prefill-1": "ready",
            "decode-1": "ready",
        }
        table = run_here(baton, "status", "--router-url", up.url)
        assert table.returncode == 0, table.stderr
        for word in ("prefill-1", "decode-1", "ready", "512"):
            assert word in table.stdout

        process.send_signal(number)
        assert process.wait(WAIT_S) == 0
        up.assert_all_gone()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_up_stops_in_order_when_its_terminal_closes(tmp_path: Path) -> None:
    """A hang-up ends the session's leader, and every later line to the terminal fails."""
    controller, terminal = pty.openpty()
    arguments = command("cli.main", "up", "--model", str(DEMO_MODEL), *SMALL)
    with subprocess.Popen(
        ["setsid", "--ctty", *arguments],
        cwd=ROOT, env=environment(tmp_path), stdin=terminal, stdout=terminal, stderr=terminal,
    ) as process:  # fmt: skip
        os.close(terminal)
        try:
            shown = b""
            while b"Ctrl-C" not in shown:
                shown += os.read(controller, 4096)
            children = psutil.Process(process.pid).children(recursive=True)
            os.close(controller)
            assert process.wait(WAIT_S) == 0
            _, alive = psutil.wait_procs(children, timeout=0)
            assert not alive, "it ended before its children"
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []


def assert_workers_are_kept_apart(up: Up) -> None:
    """Each on cores of its own, where there are two."""
    if len(usable_cores()) < 2 or not can_keep_to_cores():
        assert "kept to its own" not in up.printed
        return
    assert "each kept to its own (" in up.printed
    prefill, decode = (
        {*child.cpu_affinity()}
        for child in up.children
        if {*child.cmdline()} & {"prefill", "decode"}
    )
    assert prefill.isdisjoint(decode)
    assert len(prefill) == len(decode) == len(usable_cores()) // 2


def test_fleet_without_prefill_workers_serves_and_ends_with_its_killed_up(tmp_path: Path) -> None:
    with forked_up(tmp_path, "--prefill=0") as (up, process):
        body = {"model": DEMO_MODEL.name, "prompt": "def f(): " * 40, "max_tokens": 4}
        answer = HTTP.post(f"{up.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        workers = HTTP.get(f"{up.url}/fleet").json()["workers"]
        assert [each["role"] for each in workers] == ["decode"]
        soft, hard = resource.prlimit(workers[0]["pid"], resource.RLIMIT_NOFILE)
        assert soft >= min(hard, MOST_FILES), "strangers' connections cannot use up all files"
        process.kill()
        process.join(WAIT_S)
        up.assert_all_gone()
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1, left
    assert left[0].startswith("baton-logs-"), "the logs stay, to be read"


def test_what_is_wrong_with_the_checkpoint_is_one_line_and_exit_code_2(
    tmp_path: Path, run_here: Run
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    (folder / "config.json").write_text(json.dumps(config))
    result = run_here(baton, "up", "--model", str(folder), *SMALL)
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    for word in ("GPT2LMHeadModel", "LlamaForCausalLM"):
        assert word in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_log_folder_that_cannot_be_made_is_one_line_and_exit_code_2(
    tmp_path: Path, run_here: Run
) -> None:
    (tmp_path / "file").touch()
    log_dir = tmp_path / "file" / "logs"
    result = run_here(baton, "up", "--model", str(DEMO_MODEL), *SMALL, f"--log-dir={log_dir}")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert str(log_dir) in result.stderr


def test_port_in_use_is_one_line_and_exit_code_2(run_here: Run) -> None:
    with listen("127.0.0.1", 0) as another_router_s:
        port = another_router_s.getsockname()[1]
        result = run_here(baton, "up", "--model", str(DEMO_MODEL), *SMALL, f"--port={port}")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert str(port) in result.stderr


def test_demo_once_shows_text_and_times_and_leaves_nothing(tmp_path: Path, run_here: Run) -> None:
    before = our_processes()
    result = run_here(demo, "--once", "--model=demo_model")
    assert result.returncode == 0, result.stderr
    assert OVER_NIXL in result.stdout
    answer = result.stdout.partition("assistant: ")[2].partition("Where the time of")
    assert answer[0].strip(), result.stdout
    for phase in ("queue", "prefill", "transfer", "over nixl", "decode"):
        assert phase in answer[2]
    assert_no_other_processes(before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_the_demo_holds_a_conversation_with_a_real_model(tmp_path: Path) -> None:
    smollm2()
    result = subprocess.run(
        command("cli.demo", "--once", "--transport=shm"),
        cwd=ROOT,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert result.returncode == 0, result.stderr
    _, *answers = result.stdout.split("user: ")
    assert len(answers) == 3
    first, second, third = answers
    assert first.startswith("What is the capital of France?")
    assert "Paris" in first
    assert "0 of 37 tokens cached | prefill-1 > decode-1" in first
    for later in (second, third):  # where the KV lies
        assert re.search(r"\b[1-9]\d* of \d+ tokens cached \| decode-1", later)
    assert third.count("Where the time of") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def shown_models(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models of the fleets that demos would start."""
    models: list[str] = []
    monkeypatch.setattr("cli.demo.run_fleet", lambda fleet, *_: models.append(fleet.settings.model))
    return models


def test_the_demo_shows_the_real_model(run_here: Run, shown_models: list[str]) -> None:
    result = run_here(demo, "--once")
    assert result.returncode == 0
    assert NO_PACKAGE not in result.stdout
    assert shown_models == [str(resolve_model(smollm2()))]


def test_the_demo_says_why_the_bundled_model_answers(
    run_here: Run, shown_models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoint.packaged_model.PACKAGE", "no_such_package")
    result = run_here(demo, "--once")
    assert result.returncode == 0
    assert NO_PACKAGE in result.stdout
    assert shown_models == [str(DEMO_MODEL)]
