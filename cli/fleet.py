"""A fleet on this host: Valkey, workers and router as processes, from start to stop.

Owns every process it starts and leaves none behind: it stops router, workers and Valkey in this
order, and kills a process that does not end within its grace period. Children read settings that
are not forwarded from the environment and file that this process was given. Prints nothing.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from cli.child import Child
from cli.child_settings import ChildSettings, Secrets
from cli.http_json import RouterAccess, RouterUnreachable, get_json, is_ok
from cli.up_settings import UpSettings
from gateway.admission.api_keys import make_key
from process.orphans import reap_orphans
from process.sockets.host_names import bracketed, unbracketed
from process.store.embedded_valkey import EmbeddedValkey
from process.store.fleet_watcher import read_fleet
from process.store.store_url import store_url
from process.temporary_files import temporary_folder
from protocol.errors import BatonError, ConfigError, ServiceError
from protocol.messages import Role
from protocol.registration import WorkerInfo, WorkerState

log = logging.getLogger(__name__)

POLL_S = 0.05
BACKOFF_S = 1.0
BACKOFF_MAX_S = 30.0
STEADY_S = 60.0
_INIT = 1
_PROGRESS = re.compile("(loading weights|taking memory|building kernels).*")
MISCONFIGURED = 2
"""Exit status of a process whose settings or checkpoint are wrong, or whose id is taken."""


class Fleet:
    """Workers and a router for one model; a context manager, also for tests."""

    def __init__(
        self,
        settings: UpSettings,
        child_settings: ChildSettings | None = None,
        on_progress: Callable[[str], None] = lambda line: None,
        take_line: Callable[[str, str], None] | None = None,
    ) -> None:
        """`on_progress` gets lines about the progress of the start. `take_line`, if given, gets the
        name of a process and a line that it has written, from other threads; then there are no log
        files. Starts nothing yet."""
        self.settings = settings
        self.workers: dict[str, WorkerInfo] = {}
        self.processes: dict[str, Child] = {}
        self._child_settings = child_settings or ChildSettings(settings)
        self._on_progress = on_progress
        self._take_line = take_line
        self._valkey: EmbeddedValkey | None = None
        self._redis_url = ""
        self._url = ""
        self._supervisor_key = make_key()
        self._log_dir: Path | None = None
        self._revive_at: dict[str, float] = {}
        self._revive_valkey_at = 0.0
        self._started_at: dict[str, float] = {}
        self._drained: set[str] = set()
        self._misconfigured: set[str] = set()
        self._given_up: set[str] = set()

    # -- the running fleet ------------------------------------------------------------------

    @property
    def url(self) -> str:
        """`http://host:port` of the router (`https` with TLS), as reached from this host."""
        assert self._url, "not started"
        return self._url

    @property
    def access(self) -> RouterAccess:
        """Access to the router's operators' paths, whatever keys the router was given."""
        return RouterAccess(self._supervisor_key, self.settings.tls_cert_file, is_here=True)

    @property
    def redis_url(self) -> str:
        """The Redis where the fleet is registered; the URL holds a password."""
        return self._redis_url

    @property
    def valkey(self) -> EmbeddedValkey | None:
        """The embedded Valkey; None if `redis_url` named another store."""
        return self._valkey

    @property
    def log_dir(self) -> Path:
        """The folder with each process's log, `NAME.log`."""
        assert self._log_dir is not None, "not started"
        return self._log_dir

    # -- start ------------------------------------------------------------------------------

    def start(self) -> Fleet:
        """Start everything; returns when the router is connected to every worker and serves.

        Raises ConfigError if Valkey cannot start, or if a process rejects its settings or
        checkpoint. Raises ServiceError if a process cannot be started and, with the last log lines,
        if a process ends otherwise or time is up. After an error nothing runs.
        """
        try:
            self._open_log_dir()
            self._start_valkey()
            for child in self._make_children():
                self.processes[child.name] = child
                self._start_child(child)
            self._await_ready(time.monotonic() + self.settings.startup_timeout_s)
            self._keep_port()
        except BaseException:
            self.stop()
            raise
        return self

    def _open_log_dir(self) -> None:
        if self.settings.log_dir is None:
            self._log_dir = temporary_folder("baton-logs-")
        else:
            self._log_dir = Path(self.settings.log_dir)
            try:
                self._log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"log_dir {self._log_dir}: {error.strerror}") from error

    def _start_valkey(self) -> None:
        self._redis_url = store_url(self.settings)
        if self.settings.redis_url is None:
            valkey = EmbeddedValkey()
            if self._take_line is not None:
                valkey.forward_to(partial(self._take_line, "valkey"))
            self._valkey = valkey.start()
            self._redis_url = self._valkey.url

    def _make_children(self) -> list[Child]:
        secret = self.settings.cluster_secret or secrets.token_urlsafe(32)
        shared = Secrets(self._redis_url, secret, supervisor_key=self._supervisor_key)
        suffix = "" if self._valkey else f"-{secrets.token_hex(2)}"
        counts = ((Role.PREFILL, self.settings.prefill), (Role.DECODE, self.settings.decode))
        names = [
            (role, f"{role.value}-{number}{suffix}")
            for role, count in counts
            for number in range(1, count + 1)
        ]
        shares = self._child_settings.core_shares or [[]] * len(names)
        children = [
            self._child_settings.worker(role, name, shared, self.log_dir, cores)
            for (role, name), cores in zip(names, shares, strict=True)
        ]
        return [*children, self._child_settings.router(shared, self._port_file, self.log_dir)]

    @property
    def _port_file(self) -> Path:
        return self.log_dir / "router.port"

    def _start_child(self, child: Child) -> None:
        if self._take_line is not None:
            child.forward_to(self._take_line)
        child.start()
        self._started_at[child.name] = time.monotonic()

    def _await_ready(self, deadline: float) -> None:
        while not self._is_ready():
            self._reap_orphans()
            self._report_progress()
            for child in self.processes.values():
                if not child.is_running():
                    raise _early_end(child)
            if time.monotonic() >= deadline:
                raise ServiceError(self._why_not_ready())
            time.sleep(POLL_S)
        self._report_progress()

    def _keep_port(self) -> None:
        """Let a restarted router listen on the port that clients know, also if it was any free
        one. Nobody waits for its port file, whose folder may be gone by then."""
        port = int(self._port_file.read_text())
        self.processes["router"].add_flags(f"--port={port}", "--port-file=none")

    def _is_ready(self) -> bool:
        """Whether every worker is READY in the registry and connected, and the router healthy."""
        found = read_fleet(self._redis_url, self.settings.cluster)
        ours = [child for child in self.processes.values() if child.role != Role.ROUTER]
        self.workers = {
            child.name: found[child.name]
            for child in ours
            if child.name in found and found[child.name].pid == child.pid
        }
        ready = [each for each in self.workers.values() if each.state is WorkerState.READY]
        if len(ready) < len(ours) or not self._port_file.exists():
            return False
        self._url = _local_url(self.settings, int(self._port_file.read_text()))
        return self._is_connected(ours) and is_ok(f"{self._url}/health", access=self.access)

    def _is_connected(self, ours: Iterable[Child]) -> bool:
        try:
            shown = get_json(f"{self._url}/fleet", access=self.access)
        except RouterUnreachable:
            return False
        connected = {each["worker_id"] for each in shown["workers"] if each["connected"]}
        return all(child.name in connected for child in ours)

    def _report_progress(self) -> None:
        """Report each process's latest new log line about a slow step of its start."""
        for child in self.processes.values():
            found = [_PROGRESS.search(line) for line in child.new_lines()]
            latest = [each.group() for each in found if each]
            if latest:
                self._on_progress(f"{child.name}: {latest[-1]}")

    def _why_not_ready(self) -> str:
        """The processes that keep the fleet from serving, with their last log lines; the router
        if all workers are ready."""
        states = {
            name: self.workers[name].state if name in self.workers else "not registered"
            for name, child in self.processes.items()
            if child.role != Role.ROUTER
        }
        waiting = {name: state for name, state in states.items() if state != WorkerState.READY}
        waiting = waiting or {"router": "not serving, or not connected to all workers"}
        names = ", ".join(f"{name} ({state})" for name, state in waiting.items())
        tails = "\n".join(f"{name}: {self.processes[name].log_tail(4)}" for name in waiting)
        limit_s = self.settings.startup_timeout_s
        return f"the fleet did not serve within {limit_s:g} s; waited for {names}\n{tails}"

    # -- supervise --------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Restart processes that ended; returns lines about ends and restarts since the last call.

        A worker that ended with status 0 was drained and is not restarted. A worker that ended as
        misconfigured is restarted once, because its memory or its id may be free again. What cannot
        be started, because the system has no process or memory to spare, is tried again.

        The thread that called `start` must call this periodically.
        """
        self._reap_orphans()
        now = time.monotonic()
        news: list[str] = []
        for child in self.processes.values():
            if child.is_running() or child.name in self._given_up:
                continue
            if child.exit_status() == 0:
                if child.name not in self._drained:
                    self._drained.add(child.name)
                    news.append(f"{child.name} was drained and has ended")
            elif child.name not in self._revive_at:
                news.append(self._note_death(child, now))
            elif self.settings.restart and now >= self._revive_at[child.name]:
                news.append(self._restart(child, now))
        valkey = self._valkey
        if valkey is not None and valkey.exit_status() is not None:
            news += self._restart_valkey(valkey, now)
        return news

    def _restart(self, child: Child, now: float) -> str:
        try:
            self._start_child(child)
        except ServiceError as error:
            self._revive_at[child.name] = now + BACKOFF_MAX_S
            return f"{error}; trying again in {BACKOFF_MAX_S:g} s"
        del self._revive_at[child.name]
        return f"{child.name} was restarted, pid {child.pid}"

    def _restart_valkey(self, valkey: EmbeddedValkey, now: float) -> list[str]:
        """Try it, or wait after a failure; the fleet serves without it meanwhile."""
        if now < self._revive_valkey_at:
            return []
        try:
            valkey.restart()
        except ConfigError as error:
            self._revive_valkey_at = now + BACKOFF_MAX_S
            return [f"{error}; trying again in {BACKOFF_MAX_S:g} s"]
        return [f"the embedded Valkey ended and was restarted, pid {valkey.pid}"]

    def _reap_orphans(self) -> None:
        """As PID 1 of a container, reap the processes that children have left behind."""
        if os.getpid() != _INIT:
            return
        own = {child.pid for child in self.processes.values() if child.num_starts}
        reap_orphans(own | ({self._valkey.pid} if self._valkey else set()))

    def _note_death(self, child: Child, now: float) -> str:
        lived_s = now - self._started_at[child.name]
        backoff_s = BACKOFF_S
        if lived_s < STEADY_S:
            backoff_s = min(BACKOFF_S * 2 ** (child.num_starts - 1), BACKOFF_MAX_S)
        self._revive_at[child.name] = now + backoff_s
        what_next = ""
        if lived_s >= STEADY_S:
            self._misconfigured.discard(child.name)
        if self._is_hopeless(child):
            self._given_up.add(child.name)
            what_next = "; not restarting it again"
        elif self.settings.restart:
            what_next = f"; restarting it in {backoff_s:g} s"
        tail = child.log_tail(4)
        return f"{child.name} {child.ending()} after {lived_s:.0f} s{what_next}\n{tail}"

    def _is_hopeless(self, child: Child) -> bool:
        """Whether a worker has ended as misconfigured twice in a row."""
        if child.role == Role.ROUTER or child.exit_status() != MISCONFIGURED:
            self._misconfigured.discard(child.name)
            return False
        is_again = child.name in self._misconfigured
        self._misconfigured.add(child.name)
        return is_again

    # -- stop -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop everything in order; nothing runs afterwards. May be called twice."""
        children = list(self.processes.values())
        routers = [child for child in children if child.role == Role.ROUTER]
        self._stop_children(routers)
        self._stop_children([child for child in children if child not in routers])
        if self._valkey is not None:
            self._valkey.stop()
        if self.settings.log_dir is None and self._log_dir is not None:
            shutil.rmtree(self._log_dir, ignore_errors=True)

    def kill(self) -> None:
        """End every process at once; `stop` still has to be called."""
        for child in self.processes.values():
            child.signal(signal.SIGKILL)

    def _stop_children(self, children: Sequence[Child]) -> None:
        for child in children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + self.settings.stop_grace_s
        for child in children:
            if not child.wait(max(0.0, deadline - time.monotonic())):
                log.warning("%s did not stop in time and is killed", child.name)
                child.signal(signal.SIGKILL)
        for child in children:
            child.wait(self.settings.stop_grace_s)

    def __enter__(self) -> Fleet:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _early_end(child: Child) -> BatonError:
    """The error for a process that ended before the fleet was ready; a misconfigured process's
    own message becomes a ConfigError."""
    if child.exit_status() == MISCONFIGURED:
        complaint = child.log_tail(1).partition(": ")
        return ConfigError(f"{child.name} cannot start: {complaint[2] or complaint[0]}")
    return ServiceError(
        f"{child.name} {child.ending()} before the fleet was ready:\n{child.log_tail()}"
    )


def _local_url(settings: UpSettings, port: int) -> str:
    """A URL for this host; a wildcard address is replaced by the loopback address."""
    scheme = "http" if settings.tls_cert_file is None else "https"
    host = unbracketed(settings.host)
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://{bracketed(local)}:{port}"
