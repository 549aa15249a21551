"""A fleet under diagnosis: its processes, others beside them, Prometheus, and its console."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cli.child import Child
from cli.fleet import Fleet
from cli.up_settings import UpSettings
from tests.chart.chart import CHART_FOLDER
from tests.forked import ForkedChild, ForkedChildren
from tests.http_client import HTTP
from tests.integration.fleets import SETTINGS, wait_for
from tests.paths import DEMO_MODEL
from tests.prometheus import Prometheus, running_prometheus

SECRET = "the secret of a fleet under diagnosis"
RULES = CHART_FOLDER / "files/rules/baton.yaml"
OWN = {"namespace": "diagnosis", "release": "diagnosis"}
FASTER = 12
"""The rules' times are divided by this, so that an alert for five minutes takes 25 seconds."""
START_S = 120.0
_DURATION = re.compile(r"(?<=\[)(\d+)([smh])(?=\])|(?<=for: )(\d+)([smh])")
_METRICS = re.compile(r"metrics and probes on http://(\S+)")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Beside:
    """A further process of the fleet: a `decode` or `prefill` worker, or a `router`, with settings
    of its own by environment; `module` is run."""

    name: str
    kind: str
    environment: Mapping[str, str] = field(default_factory=dict)
    model: Path = DEMO_MODEL
    secret: str = SECRET
    module: str = "cli.main"


@dataclass(frozen=True)
class Reading:
    """What the console says at one time."""

    headline: str
    findings: Sequence[Mapping[str, Any]]
    alerts: frozenset[str]
    healthy: frozenset[str]
    """The ids of usable workers."""
    starved_share: float
    """Of the time that the fleet's processes could run, the share in which they waited."""


class Scene:
    """A running fleet. `processes` are those beside it, by name; `url` is the router's."""

    def __init__(self, fleet: Fleet, folder: Path, prometheus: Prometheus) -> None:
        self.fleet = fleet
        self.folder = folder
        self.processes: dict[str, Child] = {}
        self._prometheus = prometheus

    @property
    def url(self) -> str:
        return self.fleet.url

    def pid(self, name: str) -> int:
        """The process id of a worker or router, of the fleet or beside it."""
        if name in self.processes:
            return self.processes[name].pid
        return self.fleet.processes[name].pid

    def get(self, path: str) -> Any:
        """A JSON document of the router, as an operator gets it."""
        access = self.fleet.access
        headers = {"authorization": f"Bearer {access.key}"} if access.key else {}
        return HTTP.get(f"{self.url}{path}", headers=headers).raise_for_status().json()

    def read(self) -> Reading:
        """What the console says now."""
        fleet, rules = self.get("/fleet"), self._prometheus.rules()
        return Reading(
            headline=fleet["pressure"]["verdict"],
            findings=self.get("/doctor")["findings"],
            alerts=frozenset(n for n, each in rules.items() if each["state"] == "firing"),
            healthy=_usable(fleet),
            starved_share=max((each["waiting_share"] for each in fleet["hosts"]), default=0.0),
        )

    def cpu_s(self) -> float:
        """The CPU time of the fleet's processes that live."""
        total = 0.0
        for each in (*self.fleet.processes.values(), *self.processes.values()):
            with suppress(psutil.NoSuchProcess):
                total += sum(psutil.Process(each.pid).cpu_times()[:2])
        return total

    def healthy_workers(self) -> set[str]:
        """The ids of usable workers."""
        return set(_usable(self.get("/fleet")))

    def start(self, beside: Beside) -> None:
        """Start a process beside the fleet; it may be one that the fleet cannot use."""
        environment = {
            **os.environ,
            "BATON_REDIS_URL": self.fleet.redis_url,
            "BATON_CLUSTER_SECRET": beside.secret,
            "BATON_DEVICE": "cpu",
            "BATON_TORCH_THREADS": "1",
            **beside.environment,
        }
        command = [sys.executable, "-m", beside.module, beside.kind, f"--model={beside.model}"]
        command += ["--host=127.0.0.1"]
        if beside.kind == "router":
            command += ["--port=0"]
        else:
            environment = {"BATON_NUM_BLOCKS": "2048", **environment}
            command += [f"--worker-id={beside.name}"]
        log_path = self.folder / f"{beside.name}.log"
        child = ForkedChild(beside.name, beside.kind, command, environment, log_path)
        child.start()
        self.processes[beside.name] = child

    def end_processes(self) -> None:
        """End the processes beside the fleet, also stopped ones."""
        for each in self.processes.values():
            each.signal(signal.SIGKILL)
            each.wait(60.0)


def _usable(fleet: Mapping[str, Any]) -> frozenset[str]:
    workers = fleet["workers"]
    return frozenset(e["worker_id"] for e in workers if e["condition"]["state"] == "usable")


@contextmanager
def running(
    folder: Path, settings: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[Scene]:
    """A fleet with Prometheus beside it; its files lie in `folder`."""
    usual = SETTINGS | {"cluster_secret": SECRET, "log_dir": str(folder / "logs")}
    chosen = UpSettings(**(usual | settings))
    environ = {**os.environ, "BATON_METRICS_PORT": "0", **environment}
    children = ForkedChildren(chosen, frozenset(usual | settings), environ)
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(chosen, children))
        rules = folder / "rules.yaml"
        rules.write_text(faster(RULES.read_text()))
        prometheus = stack.enter_context(
            running_prometheus(folder, _addresses(fleet), rules, OWN, fleet.access.key)
        )
        wait_for("Prometheus to see the router", lambda: _sees_router(prometheus), START_S)
        scene = Scene(fleet, folder, prometheus)
        stack.callback(scene.end_processes)
        yield scene


def _sees_router(prometheus: Prometheus) -> bool:
    """Whether Prometheus has scraped the router, and its rules see the router. Until then, rules
    report that no router is there."""
    is_up = prometheus.targets().get("router") == "up"
    return is_up and prometheus.rules()["BatonNoRouter"]["state"] == "inactive"


def _addresses(fleet: Fleet) -> dict[str, str]:
    addresses = {"router": fleet.url.removeprefix("http://")}
    for name, child in fleet.processes.items():
        found = _METRICS.search(child.log_path.read_text())
        if found is not None:
            addresses[name] = found[1]
    return addresses


def faster(rules: str) -> str:
    """The rules with all times divided by `FASTER`."""

    def shorter(match: re.Match[str]) -> str:
        number, unit = (each for each in match.groups() if each is not None)
        return f"{max(2, round(int(number) * _SECONDS[unit] / FASTER))}s"

    return _DURATION.sub(shorter, rules)


def wait_for_worker(scene: Scene, worker_id: str, state: str = "usable") -> None:
    """Wait until a worker is in a condition."""

    def is_there() -> bool:
        workers = scene.get("/fleet")["workers"]
        return any(
            e["worker_id"] == worker_id and e["condition"]["state"] == state for e in workers
        )

    wait_for(f"{worker_id} to be {state}", is_there, START_S)
