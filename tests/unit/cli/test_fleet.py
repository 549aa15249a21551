"""The life of a fleet, with light processes in place of workers and router."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from cli.fleet import MISCONFIGURED, STEADY_S, Fleet
from cli.http_json import get_json, is_ok
from cli.output.json_output import JsonOutput
from cli.up import console_on, run_fleet, show
from cli.up_settings import UpSettings
from process.process_watch import machine_name
from process.store.embedded_valkey import EmbeddedValkey
from process.store.worker_lease import WorkerLease
from protocol.errors import ConfigError, ServiceError
from tests.forked import ForkedChild, fork_context
from tests.paths import ROOT
from tests.processes import has_ended
from tests.registration import registration
from tests.unit.cli.fake_process import CLUSTER, LONG_LEASE_S, FakeChildren

WAIT_S = 120.0
PAUSE, POLL_S = threading.Event(), 0.02
NAMES = ("prefill-1", "decode-1", "router", "valkey", "up")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process of ours is left after a test but the server that forks them."""
    fork_context()
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def make_fleet(
    log_dir: Path,
    behaviours: dict[str, str] | None = None,
    on_progress: Callable[[str], None] = lambda line: None,
    lease_s: float = LONG_LEASE_S,
    child: type[ForkedChild] = ForkedChild,
    **options: object,
) -> Fleet:
    settings = UpSettings(
        model="nothing", port=0, log_dir=str(log_dir), startup_timeout_s=WAIT_S, **options
    )
    children = FakeChildren(settings)
    children.behaviours, children.lease_s = behaviours or {}, lease_s
    children.child = child
    return Fleet(settings, children, on_progress)


def until(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline, "waited in vain"
        PAUSE.wait(POLL_S)


def test_with_logs_to_standard_output_every_line_is_json(tmp_path: Path) -> None:
    """Those of all processes and of Valkey, and what is shown; there are no log files."""
    stream = io.StringIO()
    output = JsonOutput(stream)
    settings = UpSettings(model="m", port=0, log_dir=str(tmp_path), log_to="stdout")
    children = FakeChildren(settings)
    console = console_on(output)
    with Fleet(settings, children, console.print, output.write_line) as fleet:
        show(fleet, console)
        until(lambda: "loading weights" in fleet.processes["decode-1"].log_tail())
    until(lambda: stream.getvalue().count("stopped in order") == 3)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    by_name = {who: [x["message"] for x in lines if x["who"] == who] for who in NAMES}
    assert {"time", "level", "who", "logger", "message"} == set().union(*lines)
    for name in ("prefill-1", "decode-1", "router"):
        assert by_name[name][-1] == f"{name} stopped in order"
    assert any("Ready to accept connections" in each for each in by_name["valkey"])
    assert "logs     standard output" in by_name["up"]
    assert not list(tmp_path.glob("*.log"))


def test_a_process_that_cannot_start_is_quoted_from_standard_output(tmp_path: Path) -> None:
    settings = UpSettings(model="m", port=0, log_dir=str(tmp_path), log_to="stdout")
    children = FakeChildren(settings)
    children.behaviours = {"decode-1": "broken"}
    output = JsonOutput(io.StringIO())
    with pytest.raises(ServiceError, match="the frobnicator is missing"):
        Fleet(settings, children, take_line=output.write_line).start()


def test_starts_serves_and_stops_in_order(tmp_path: Path) -> None:
    progress: list[str] = []
    with make_fleet(tmp_path, on_progress=progress.append, prefill=2) as fleet:
        names = ["prefill-1", "prefill-2", "decode-1"]
        assert list(fleet.processes) == [*names, "router"]
        assert sorted(fleet.workers) == sorted(names)
        shown = {each["worker_id"] for each in get_json(f"{fleet.url}/fleet")["workers"]}
        assert shown == set(names)
        assert fleet.check() == []
        pids = [child.pid for child in fleet.processes.values()]
        assert fleet.valkey is not None
        pids.append(fleet.valkey.pid)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert {child.exit_status() for child in fleet.processes.values()} == {0}
    for name in fleet.processes:
        assert f"{name} stopped in order" in (tmp_path / f"{name}.log").read_text()
    fleet.stop()
    expected = {f"{name}: loading weights of nothing: 50 %" for name in names}
    assert sorted(progress) == sorted(expected | {"router: building kernels of nothing: 50 %"})


def test_temporary_logs_are_removed() -> None:
    settings = UpSettings(model="nothing", port=0, startup_timeout_s=WAIT_S)
    with Fleet(settings, FakeChildren(settings)) as fleet:
        assert (fleet.log_dir / "router.log").exists()
    assert not fleet.log_dir.exists()


@pytest.mark.parametrize("name", ["decode-1", "router"])
def test_a_process_that_ends_early_fails_the_start_with_its_words(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(ServiceError) as error:
        make_fleet(tmp_path, {name: "broken"}).start()
    assert f"{name} ended with status 3 before the fleet was ready" in error.value.message
    assert "the frobnicator is missing" in error.value.message


def test_a_start_that_takes_too_long_names_what_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is up as soon as all other workers are ready, however long they take."""
    fleet = make_fleet(tmp_path, {"decode-1": "loading"})

    def now() -> float:
        is_late = {"prefill-1", "decode-1"} <= fleet.workers.keys()
        return time.monotonic() + (1e6 if is_late else 0.0)

    clock = SimpleNamespace(monotonic=now, sleep=time.sleep)
    monkeypatch.setattr("cli.fleet.time", clock)
    with pytest.raises(ServiceError, match=r"within 120 s; waited for decode-1 \(loading\)\n"):
        fleet.start()


def test_what_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is up as soon as all others have stopped, however long they take."""
    with make_fleet(tmp_path, {"decode-1": "stubborn"}, stop_grace_s=WAIT_S) as fleet:
        others = [fleet.processes[name] for name in ("prefill-1", "router")]

        def now() -> float:
            is_late = not any(child.is_running() for child in others)
            return time.monotonic() + (1e6 if is_late else 0.0)

        monkeypatch.setattr("cli.fleet.time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    ends = {name: child.exit_status() for name, child in fleet.processes.items()}
    assert ends == {"prefill-1": 0, "decode-1": -signal.SIGKILL, "router": 0}


class ImpatientlyStopped(Fleet):
    """Gets a signal when it begins to stop."""

    num_stops = 0

    def stop(self) -> None:
        self.num_stops += 1
        if self.num_stops == 1:
            signal.raise_signal(signal.SIGINT)
        super().stop()


def test_a_signal_while_it_stops_by_itself_leaves_nothing(tmp_path: Path) -> None:
    settings = UpSettings(model="nothing", port=0, log_dir=str(tmp_path), startup_timeout_s=WAIT_S)
    fleet = ImpatientlyStopped(settings, FakeChildren(settings))
    run_fleet(fleet, Console(quiet=True), while_serving=lambda fleet: False)
    assert fleet.num_stops == 2
    assert {child.exit_status() for child in fleet.processes.values()} == {0}


def test_a_process_that_dies_is_reported_and_started_again(tmp_path: Path) -> None:
    with make_fleet(tmp_path) as fleet:
        child = fleet.processes["decode-1"]
        former = child.pid
        child.signal(signal.SIGKILL)
        assert child.wait(WAIT_S)
        (news,) = fleet.check()
        assert re.match(r"decode-1 was ended by SIGKILL after \d+ s; restarting it in 1 s", news)
        assert fleet.check() == [], "it is reported once"
        later: list[str] = []
        until(lambda: later.extend(fleet.check()) or later)
        assert later == [f"decode-1 was restarted, pid {child.pid}"]
        assert child.pid != former
        assert child.num_starts == 2


def test_a_router_that_dies_comes_back_at_the_same_port(tmp_path: Path) -> None:
    """Also where any free one was asked for, and after the folder of logs went away."""
    with make_fleet(tmp_path) as fleet:
        child = fleet.processes["router"]
        child.signal(signal.SIGKILL)
        assert child.wait(WAIT_S)
        for name in ("router.log", "router.port"):
            (tmp_path / name).unlink()
        until(lambda: any("was restarted" in line for line in fleet.check()))
        until(lambda: is_ok(f"{fleet.url}/health"))
        assert not (tmp_path / "router.port").exists(), "its folder may be gone"


class HardToStart(ForkedChild):
    """Cannot be started again until `is_possible`."""

    is_possible = True

    def start(self) -> None:
        if self.num_starts and not self.is_possible:
            raise ServiceError(f"{self.name} cannot be started: no memory")
        super().start()


def test_what_cannot_be_started_again_is_tried_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.fleet.BACKOFF_S", 0.05)
    monkeypatch.setattr("cli.fleet.BACKOFF_MAX_S", 0.05)
    monkeypatch.setattr(HardToStart, "is_possible", False)
    monkeypatch.setattr(EmbeddedValkey, "restart", refuse_once(EmbeddedValkey.restart))
    with make_fleet(tmp_path, child=HardToStart) as fleet:
        news: list[str] = []
        child = fleet.processes["decode-1"]
        child.signal(signal.SIGKILL)
        assert child.wait(WAIT_S)
        assert fleet.valkey is not None
        os.kill(fleet.valkey.pid, signal.SIGKILL)
        told = {
            "decode-1 cannot be started: no memory; trying again in 0.05 s",
            "no port; trying again in 0.05 s",
        }
        until(lambda: news.extend(fleet.check()) or told <= set(news))
        until(lambda: news.extend(fleet.check()) or "Valkey ended and was restarted" in str(news))
        assert fleet.processes["router"].is_running()
        monkeypatch.setattr(HardToStart, "is_possible", True)
        until(lambda: any("decode-1 was restarted" in line for line in fleet.check()))


def refuse_once(real: Callable[[EmbeddedValkey], None]) -> Callable[[EmbeddedValkey], None]:
    failures = [ConfigError("no port")]

    def restart(self: EmbeddedValkey) -> None:
        if failures:
            raise failures.pop()
        real(self)

    return restart


@pytest.mark.skipif(sys.platform != "linux", reason="machines have names on Linux alone")
def test_a_worker_whose_id_another_process_holds_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.fleet.BACKOFF_S", 0.05)
    with make_fleet(tmp_path) as fleet:
        child = fleet.processes["decode-1"]
        child.signal(signal.SIGKILL)
        assert child.wait(WAIT_S)
        info = registration("decode-1", machine=machine_name(), pid=os.getpid())
        lease = WorkerLease(fleet.redis_url, CLUSTER, info, LONG_LEASE_S)
        lease.start()
        assert lease.wait_registered(WAIT_S)
        news: list[str] = []

        def are_all_told() -> bool:
            lease.update(info.state)  # renews it: so the newcomer sees that its holder lives
            news.extend(fleet.check())
            return PAUSE.wait(0.02) or len(news) == 5

        until(are_all_told)
        assert [line.partition(" after")[0] for line in news if "restarted, pid" not in line] == [
            "decode-1 was ended by SIGKILL",
            "decode-1 ended with status 2",
            "decode-1 ended with status 2",
        ]
        assert "; restarting it in 0.1 s" in news[2]
        assert "; not restarting it again\n" in news[4]
        assert f"worker_id decode-1 is held by the decode worker at {info.control}" in news[4]
        later = time.monotonic() + 0.4
        until(lambda: fleet.check() or time.monotonic() > later)
        assert child.num_starts == 3
        assert lease.refusal is None
        lease.close()


def test_an_end_as_misconfigured_after_a_long_life_is_no_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's id was taken at its first start, and much later for other reasons."""
    with make_fleet(tmp_path) as fleet:
        child = fleet.processes["decode-1"]
        monkeypatch.setattr(type(child), "exit_status", lambda self: MISCONFIGURED)
        started = fleet._started_at[child.name]
        fleet._note_death(child, started + 1)
        fleet._note_death(child, started + STEADY_S)
        assert child.name not in fleet._given_up
        fleet._note_death(child, started + 1)
        assert child.name in fleet._given_up
        monkeypatch.undo()


def test_without_restart_it_is_only_reported(tmp_path: Path) -> None:
    with make_fleet(tmp_path, restart=False) as fleet:
        child = fleet.processes["router"]
        child.signal(signal.SIGKILL)
        assert child.wait(WAIT_S)
        (news,) = fleet.check()
        assert re.match(r"router was ended by SIGKILL after \d+ s\n", news)
        assert not child.is_running()


def test_a_dead_valkey_comes_back_and_workers_register_again(tmp_path: Path) -> None:
    with make_fleet(tmp_path, lease_s=6.0) as fleet:  # they notice within a third of that
        assert fleet.valkey is not None
        os.kill(fleet.valkey.pid, signal.SIGKILL)
        until(lambda: fleet.valkey.exit_status() is not None)
        (news,) = fleet.check()
        assert "Valkey ended and was restarted" in news
        until(lambda: len(get_json(f"{fleet.url}/fleet")["workers"]) == 2)


@pytest.mark.skipif(sys.platform != "linux", reason="Valkey's tether is Linux's")
def test_nothing_outlives_a_killed_starter(tmp_path: Path) -> None:
    code = f"""
        import os, signal
        from cli.fleet import Fleet
        from cli.up_settings import UpSettings
        from tests.unit.cli.fake_process import FakeChildren
        settings = UpSettings(model="nothing", port=0, log_dir={str(tmp_path)!r})
        fleet = Fleet(settings, FakeChildren(settings)).start()
        pids = [child.pid for child in fleet.processes.values()] + [fleet.valkey.pid]
        print(*pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 4
    until(lambda: all(has_ended(pid) for pid in pids))
