"""A child process and its log, whatever becomes of the log's folder."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from cli.child import Child
from protocol.errors import ServiceError

WAIT_S = 120.0


def child_in(folder: Path, script: str = "echo words") -> Child:
    return Child("d1", "decode", ["sh", "-c", script], os.environ, folder / "d1.log")


def run(child: Child) -> None:
    child.start()
    assert child.wait(WAIT_S)


def test_a_folder_that_went_away_is_made_again(tmp_path: Path) -> None:
    """As when the system removes old files of a folder for temporary ones."""
    folder = tmp_path / "logs"
    folder.mkdir(mode=0o700)
    child = child_in(folder)
    run(child)
    assert child.log_tail() == "words"
    shutil.rmtree(folder)
    assert (child.log_tail(), child.new_lines()) == ("", [])
    run(child)
    assert child.log_tail() == "words"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_restarted_process_runs_without_a_log_where_there_is_room_for_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "logs"
    child = child_in(folder, f"echo words >> {tmp_path}/done")
    run(child)
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    run(child)
    assert (tmp_path / "done").read_text() == "words\n" * 2
    assert child.log_tail() == ""
    (told,) = caplog.messages
    assert told.startswith("d1 runs without a log: ")
    fresh = child_in(folder)
    with pytest.raises(ServiceError, match=r"d1 cannot be started: .*logs"):
        fresh.start()


def test_the_last_lines_of_a_long_log_are_read_alone(tmp_path: Path) -> None:
    child = child_in(tmp_path, "echo first; head -c 200000 /dev/zero | tr '\\0' x; echo; echo last")
    run(child)
    assert child.log_tail(1) == "last"
    assert "first" not in child.log_tail(3)
    assert len(child.log_tail(3)) < 100_000


def refuse_once(real: Callable[..., Any]) -> Callable[..., Any]:
    failures = [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")]

    def popen(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*arguments, **options)

    return popen


def test_a_system_without_room_for_a_process_is_one_error_and_the_next_start_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = child_in(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", refuse_once(subprocess.Popen))
    with pytest.raises(ServiceError, match=r"d1 cannot be started: .*temporarily unavailable"):
        child.start()
    assert (child.exit_status(), child.num_starts) == (None, 0)
    run(child)
    assert child.log_tail() == "words"


def test_added_flags_come_last(tmp_path: Path) -> None:
    script = "import sys; print(sys.argv[1:])"
    command = [sys.executable, "-S", "-c", script, "--port=0"]
    child = Child("router", "router", command, os.environ, tmp_path / "router.log")
    child.add_flags("--port=1234")
    run(child)
    assert child.log_tail() == "['--port=0', '--port=1234']"


def test_a_system_without_room_for_a_thread_is_one_error_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With logs to standard output, a thread reads each process's output."""
    spawned: list[subprocess.Popen[bytes]] = []
    child, lines = child_in(tmp_path, "echo words"), Queue[str]()
    child.forward_to(lambda name, line: lines.put(line))
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", noted(subprocess.Popen, spawned))
        patched.setattr(threading.Thread, "start", refuse_thread)
        with pytest.raises(ServiceError, match=r"d1 cannot be started: .*temporarily unavailable"):
            child.start()
    assert (child.exit_status(), child.num_starts) == (None, 0)
    (process,) = spawned
    assert process.returncode is not None
    run(child)
    assert lines.get(timeout=WAIT_S) == child.log_tail() == "words"


def noted(real: Callable[..., Any], spawned: list[Any]) -> Callable[..., Any]:
    def popen(*arguments: Any, **options: Any) -> Any:
        spawned.append(real(*arguments, **options))
        return spawned[-1]

    return popen


def refuse_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
