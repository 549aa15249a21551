"""Ways to plant a fault in a running scene; each is a context that takes it away again."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from tests.diagnosis.load import Load, sent
from tests.diagnosis.scene import Beside, Scene, wait_for_worker
from tests.integration.fleets import wait_for
from tests.paths import DEMO_MODEL

Plant = Callable[[Scene], AbstractContextManager[None]]
_THROTTLE = """
import contextlib, os, signal, sys, time
with contextlib.suppress(PermissionError):
    os.nice(-15)  # on a busy machine it would throttle too little
while True:
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(float(sys.argv[2]))
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(float(sys.argv[2]) / 9)
"""
_BURN = "while True: pass"


@contextmanager
def nothing(scene: Scene) -> Iterator[None]:
    """The fault is in the settings or the load, or there is none."""
    yield


def killed(*names: str) -> Plant:
    """A fault: these processes are killed."""

    @contextmanager
    def plant(scene: Scene) -> Iterator[None]:
        for name in names:
            os.kill(scene.pid(name), signal.SIGKILL)
        yield

    return plant


def stopped(*names: str) -> Plant:
    """A fault: these processes are stopped."""

    @contextmanager
    def plant(scene: Scene) -> Iterator[None]:
        for name in names:
            os.kill(scene.pid(name), signal.SIGSTOP)
        yield
        for name in names:
            os.kill(scene.pid(name), signal.SIGCONT)

    return plant


def throttled(name: str, still_s: float = 0.04) -> Plant:
    """This process stands still for nine tenths of the time, as on a throttled device, or at a
    limit of its CPU time."""

    @contextmanager
    def plant(scene: Scene) -> Iterator[None]:
        arguments = [str(scene.pid(name)), str(still_s)]
        with subprocess.Popen([sys.executable, "-c", _THROTTLE, *arguments]) as process:
            try:
                yield
            finally:
                process.terminate()
        os.kill(scene.pid(name), signal.SIGCONT)

    return plant


def killed_again_and_again(name: str) -> Plant:
    """A worker is killed whenever it is usable; its supervisor starts it again."""

    @contextmanager
    def plant(scene: Scene) -> Iterator[None]:
        over = threading.Event()

        def kill() -> None:
            while not over.wait(0.5):
                scene.fleet.check()
                if name in scene.healthy_workers():
                    os.kill(scene.pid(name), signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    return plant


def joined(beside: Beside) -> Plant:
    """A further process joins, which the fleet may be unable to use."""

    @contextmanager
    def plant(scene: Scene) -> Iterator[None]:
        scene.start(beside)
        _wait_until_registered(scene, beside)
        yield

    return plant


def joined_with_another_model(name: str) -> Plant:
    """A decode worker of another model joins."""

    @contextmanager
    def plant(scene: Scene) -> Iterator[None]:
        model = _other_model(scene.folder)
        beside = Beside(name, "decode", model=model)
        scene.start(beside)
        _wait_until_registered(scene, beside)
        yield

    return plant


def _wait_until_registered(scene: Scene, beside: Beside) -> None:
    """Wait until the worker is registered: its start takes seconds, which are no part of the
    fault."""
    if beside.kind == "router":
        log = scene.folder / f"{beside.name}.log"
        wait_for("a router to listen", lambda: "listening on" in log.read_text())
        return

    def is_known() -> bool:
        workers = scene.get("/fleet")["workers"]
        states = {e["worker_id"]: e["condition"] for e in workers}
        found = states.get(beside.name)
        return found is not None and found["reason"] != "it loads its weights"

    wait_for(f"{beside.name} to register", is_known, 120.0)


def _other_model(folder: Path) -> Path:
    made = folder / "other_model"
    shutil.copytree(DEMO_MODEL, made)
    config = json.loads((made / "config.json").read_text())
    config["rope_theta"] = 2 * config.get("rope_theta", 10_000.0)
    (made / "config.json").write_text(json.dumps(config))
    return made


@contextmanager
def store_killed(scene: Scene) -> Iterator[None]:
    """The store is killed."""
    assert scene.fleet.valkey is not None
    os.kill(scene.fleet.valkey.pid, signal.SIGKILL)
    yield
    scene.fleet.check()


@contextmanager
def store_paused(scene: Scene) -> Iterator[None]:
    """The store stands still."""
    assert scene.fleet.valkey is not None
    pid = scene.fleet.valkey.pid
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


@contextmanager
def starved(scene: Scene) -> Iterator[None]:
    """Other processes use the machine's cores. Each has a session of its own: Linux shares cores
    among sessions first (autogroups), and a single one would leave the fleet half of them."""
    number = 8 * (os.cpu_count() or 1)
    burn = [sys.executable, "-c", _BURN]
    with ExitStack() as stack:
        for _ in range(number):
            process = stack.enter_context(subprocess.Popen(burn, start_new_session=True))
            stack.callback(process.kill)
        yield


def more_load(*loads: Load) -> Plant:
    """Further clients come."""

    @contextmanager
    def plant(scene: Scene) -> Iterator[None]:
        with sent(scene.url, *loads):
            yield

    return plant


def log_disk_full(name: str, occasion: Plant) -> Plant:
    """The disk of a process's log is full: a limit on the size of files refuses all lines. An
    `occasion` makes it write some."""

    @contextmanager
    def plant(scene: Scene) -> Iterator[None]:
        pid = scene.pid(name)
        former = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, former[1]))
        with occasion(scene):
            yield
        resource.prlimit(pid, resource.RLIMIT_FSIZE, former)

    return plant


@contextmanager
def rolling_restart(scene: Scene) -> Iterator[None]:
    """A decode worker is replaced in order: the new one first, then the old one is told to stop."""
    scene.start(Beside("decode-new", "decode"))
    wait_for_worker(scene, "decode-new")
    os.kill(scene.pid("decode-1"), signal.SIGTERM)
    yield
