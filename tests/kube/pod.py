"""The life of one pod on this node: created, started, probed, restarted, stopped.

One thread per pod. Its status goes to the API server whenever it changes, so that the real
controllers act on it. https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/
"""

from __future__ import annotations

import datetime
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.kube.api import STRATEGIC, Json, KubeApi, KubeError
from tests.kube.container import Container, ContainerSpec
from tests.kube.network import PodNetwork
from tests.kube.probes import Probe, http_get
from tests.kube.resolve import NotYet, PodResolver

TURN_S = 0.05
RESTART_S = 1.0

log = logging.getLogger(__name__)


class _Running:
    """A container of the pod through its restarts."""

    def __init__(self, spec: ContainerSpec, source: Json, pod_ip: str) -> None:
        self.spec, self.source = spec, source
        self.ports = {
            each["name"]: each["containerPort"]
            for each in source.get("ports", [])
            if "name" in each
        }
        self._pod_ip = pod_ip
        self.container: Container | None = None
        self.restarts = -1
        self.last_exit: int | None = None
        self.is_started = self.is_ready = False
        self.again_at = 0.0
        self.message = ""

    def start(self, pause: int, hosts: Path, folder: Path) -> None:
        self.restarts += 1
        target = folder / "containers" / f"{self.spec.name}-{self.restarts}"
        self.container = Container(self.spec, pause, hosts, target)
        self.is_started = "startupProbe" not in self.source
        self.is_ready = self.is_started and "readinessProbe" not in self.source
        self.probes = {
            kind: Probe(self.source[kind], self.ports, self._pod_ip)
            for kind in ("startupProbe", "livenessProbe", "readinessProbe")
            if kind in self.source
        }

    def probe(self) -> bool:
        """Check what is due; returns whether the container must be restarted."""
        assert self.container is not None
        if not self.is_started:
            startup = self.probes["startupProbe"]
            if startup.is_due():
                startup.check(self.container)
            self.is_started = startup.has_succeeded
            self.is_ready = self.is_started and "readinessProbe" not in self.source
            self.message = startup.last_failure
            return startup.has_failed
        for kind in ("livenessProbe", "readinessProbe"):
            probe = self.probes.get(kind)
            if probe is None or not probe.is_due():
                continue
            probe.check(self.container)
            if kind == "livenessProbe" and probe.has_failed:
                self.message = f"liveness: {probe.last_failure}"
                return True
            if kind == "readinessProbe":
                self.message = probe.last_failure
                self.is_ready = probe.has_succeeded or (self.is_ready and not probe.has_failed)
        return False

    def status(self) -> Json:
        if self.container is None:
            state: Json = {"waiting": {"reason": "PodInitializing"}}
        elif self.container.exit_code is None:
            state = {"running": {"startedAt": None}}
        else:
            code = self.container.exit_code
            reason = "Completed" if code == 0 else "Error"
            state = {"terminated": {"exitCode": code, "reason": reason}}
        return {
            "name": self.spec.name,
            "image": self.source["image"],
            "imageID": "",
            "ready": self.is_ready,
            "started": self.is_started,
            "restartCount": max(0, self.restarts),
            "state": state,
        }


class PodRunner:
    """Runs one pod until it is deleted. `pod` is the newest object, set by the kubelet."""

    def __init__(
        self, api: KubeApi, pod: Json, images: Mapping[str, list[str]],
        network: PodNetwork, folder: Path, hosts: Path,
    ) -> None:  # fmt: skip
        self.pod = pod
        self.name = pod["metadata"]["name"]
        self.is_over = False
        self._api, self._images, self._network = api, images, network
        self._folder, self._hosts = folder, hosts
        self._path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{self.name}"
        self._pause: subprocess.Popen[bytes] | None = None
        self._pod_ip = ""
        self._init: list[_Running] = []
        self._main: list[_Running] = []
        self._phase, self._message = "Pending", ""
        self._reported: Json = {}
        self._started_at = _now()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Kill everything without a word to the API server, as a node that dies does."""
        self._is_abandoned = True
        self._thread.join(10)

    @property
    def _is_deleted(self) -> bool:
        return "deletionTimestamp" in self.pod["metadata"]

    def _run(self) -> None:
        try:
            self._live()
        except KubeError as error:
            log.error("pod %s: %s", self.name, error)
        except Exception:
            log.exception("pod %s", self.name)
        finally:
            self._clean_up()
            self.is_over = True

    def _live(self) -> None:
        if self._create() and self._run_init_containers():
            for each in self._main:
                each.start(self._pause_pid, self._hosts, self._folder)
            self._phase = "Running"
            while not (self._is_deleted or self._is_abandoned or self._is_finished()):
                self._turn()
                time.sleep(TURN_S)
        self._report()
        while not (self._is_deleted or self._is_abandoned):
            time.sleep(TURN_S)
        if not self._is_abandoned:
            self._terminate()

    def _create(self) -> bool:
        """Network, volumes and references; returns False if the pod is deleted meanwhile."""
        self._folder.mkdir(parents=True)
        self._pause = subprocess.Popen(
            ["unshare", "--net", "--ipc", "--uts", "sleep", "infinity"], start_new_session=True
        )
        time.sleep(0.1)  # until unshare has made the namespaces
        self._pod_ip = self._network.attach(self._pause.pid)
        while not (self._is_deleted or self._is_abandoned):
            resolver = PodResolver(self._api, self.pod, self._images, self._folder)
            try:
                first, main = resolver.containers(self._pod_ip)
            except NotYet as error:
                self._message = str(error)
                self._report()
                time.sleep(0.2)
                continue
            spec = self.pod["spec"]
            sources = spec.get("initContainers", [])
            self._init = [_Running(a, b, self._pod_ip) for a, b in zip(first, sources, strict=True)]
            self._main = [
                _Running(a, b, self._pod_ip) for a, b in zip(main, spec["containers"], strict=True)
            ]
            self._message = ""
            self._report()
            return True
        return False

    def _run_init_containers(self) -> bool:
        for each in self._init:
            each.start(self._pause_pid, self._hosts, self._folder)
            while not (self._is_deleted or self._is_abandoned):
                assert each.container is not None
                if each.container.exit_code == 0:
                    break
                if each.container.exit_code is not None:
                    self._report()
                    time.sleep(RESTART_S)
                    each.start(self._pause_pid, self._hosts, self._folder)
                time.sleep(TURN_S)
            else:
                return False
        return True

    @property
    def _pause_pid(self) -> int:
        assert self._pause is not None
        return self._pause.pid

    def _turn(self) -> None:
        """Look after each container once."""
        policy = self.pod["spec"].get("restartPolicy", "Always")
        for each in self._main:
            assert each.container is not None
            code = each.container.exit_code
            if code is None:
                if each.probe():
                    log.warning("pod %s: %s is restarted: %s", self.name, each.spec.name,
                                each.message)  # fmt: skip
                    self._stop([each], self.pod["spec"].get("terminationGracePeriodSeconds", 30))
                continue
            each.is_ready = each.is_started = False
            if policy == "Never" or (policy == "OnFailure" and code == 0):
                continue
            if each.last_exit is None:
                each.last_exit, each.again_at = code, time.monotonic() + RESTART_S
                log.warning("pod %s: %s ended with %d", self.name, each.spec.name, code)
            elif time.monotonic() >= each.again_at:
                each.last_exit = None
                each.start(self._pause_pid, self._hosts, self._folder)
        self._report()

    def _is_finished(self) -> bool:
        """Whether all containers have ended for good."""
        policy = self.pod["spec"].get("restartPolicy", "Always")
        codes = [each.container.exit_code for each in self._main if each.container]
        is_done = all(
            code is not None and (policy == "Never" or (policy == "OnFailure" and code == 0))
            for code in codes
        )
        if is_done and codes:
            self._phase = "Succeeded" if all(code == 0 for code in codes) else "Failed"
        return is_done

    def _terminate(self) -> None:
        grace = self.pod["metadata"].get("deletionGracePeriodSeconds", 30)
        self._stop([each for each in self._main if each.container], grace)
        self._clean_up()
        uid = self.pod["metadata"]["uid"]
        self._api.delete(self._path, gracePeriodSeconds=0, preconditions={"uid": uid})

    def _stop(self, containers: list[_Running], grace_s: float) -> None:
        """preStop, SIGTERM, and SIGKILL once the grace period is over; it includes preStop."""
        deadline = time.monotonic() + grace_s
        threads = [
            threading.Thread(target=self._stop_one, args=(each, deadline)) for each in containers
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self._report()
            time.sleep(TURN_S)

    def _stop_one(self, running: _Running, deadline: float) -> None:
        container = running.container
        assert container is not None
        hook: Any = running.source.get("lifecycle", {}).get("preStop")
        left = max(0.1, deadline - time.monotonic())
        if hook and "exec" in hook:
            container.run(hook["exec"]["command"], left)
        elif hook and "httpGet" in hook:
            http_get(hook["httpGet"], running.ports, self._pod_ip, left)
        container.signal(signal.SIGTERM)
        while container.exit_code is None and time.monotonic() < deadline + 2:  # as kubelet: +2 s
            if self._is_abandoned:
                return
            time.sleep(TURN_S)
        if container.exit_code is None:
            log.warning("pod %s: %s is killed, its grace is over", self.name, running.spec.name)
            container.kill()

    def _clean_up(self) -> None:
        for each in (*self._init, *self._main):
            if each.container is not None:
                each.container.kill()
        if self._pause is not None:
            self._pause.kill()
            self._pause.wait()

    def _report(self) -> None:
        is_ready = bool(self._main) and all(each.is_ready for each in self._main)
        is_ready = is_ready and self._phase == "Running"
        status = {
            "phase": self._phase,
            "podIP": self._pod_ip or None,
            "podIPs": [{"ip": self._pod_ip}] if self._pod_ip else [],
            "hostIP": "10.97.0.1",
            "startTime": self._started_at,
            "message": self._message or None,
            "conditions": [
                _condition("PodScheduled", True),
                _condition("Initialized", self._phase != "Pending"),
                _condition("ContainersReady", is_ready),
                _condition("Ready", is_ready),
            ],
            "initContainerStatuses": [each.status() for each in self._init],
            "containerStatuses": [each.status() for each in self._main],
        }
        if status == self._reported:
            return
        try:
            # as a kubelet does it: conditions that others have set stay
            patch = {"status": _stamped(status)}
            self._api.call("PATCH", f"{self._path}/status", patch, STRATEGIC)
        except KubeError as error:
            if error.status != 404:
                raise
        self._reported = status


def _condition(kind: str, is_true: bool) -> Json:
    return {"type": kind, "status": "True" if is_true else "False"}


def _stamped(status: Json) -> Json:
    """The status with times, which the API server demands and which say nothing here."""
    now = _now()
    conditions = [{**each, "lastTransitionTime": now} for each in status["conditions"]]
    statuses = []
    for each in status["containerStatuses"]:
        running = "running" in each["state"]
        statuses.append({**each, "state": {"running": {"startedAt": now}}} if running else each)
    return {**status, "conditions": conditions, "containerStatuses": statuses}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
