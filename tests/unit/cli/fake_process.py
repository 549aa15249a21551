"""A fleet of light processes: they register and answer as real ones do, and compute nothing.

As a module it is such a process: `fake_process --parent-pid=PID ROLE NAME BEHAVIOUR`, for a router
perhaps with `--port=PORT` and `--port-file=none`. Behaviours: `good`; `broken` ends at once with
status 3; `loading` never gets ready; `stubborn` does not stop. A worker whose id another process
holds ends with status 2.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import uuid
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cli.child import Child, baton_environment
from cli.child_settings import ChildSettings, Secrets
from process.lifecycle import StopSignal
from process.process_watch import machine_name
from process.store.fleet_watcher import read_fleet
from process.store.worker_lease import WorkerLease
from protocol.messages import PROTOCOL_VERSION, Role
from protocol.registration import WorkerInfo, WorkerState

CLUSTER = "default"
LONG_LEASE_S = 60.0
"""Longer than a process may have to wait for a core."""


class FakeChildren(ChildSettings):
    """Makes fake processes; `behaviours` by name, `good` where none is given. They start
    as users' do, unless `child` is a class that forks."""

    child: type[Child] = Child
    behaviours: dict[str, str] = {}  # noqa: RUF012 - each test sets its own
    lease_s = LONG_LEASE_S

    def worker(
        self,
        role: Role,
        worker_id: str,
        shared: Secrets,
        log_dir: Path,
        cores: Sequence[int] = (),
    ) -> Child:
        return self._fake(role, worker_id, shared, log_dir, {"LEASE_S": str(self.lease_s)})

    def router(self, shared: Secrets, port_file: Path, log_dir: Path) -> Child:
        return self._fake(Role.ROUTER, "router", shared, log_dir, {"PORT_FILE": str(port_file)})

    def _fake(
        self, role: Role, name: str, shared: Secrets, log_dir: Path, more: dict[str, str]
    ) -> Child:
        behaviour = self.behaviours.get(name, "good")
        command = [sys.executable, "-m", "tests.unit.cli.fake_process"]
        command += [f"--parent-pid={os.getpid()}", role.value, name, behaviour]
        env = baton_environment({**os.environ, "REDIS": shared.redis_url, **more})
        return self.child(name, role, command, env, log_dir / f"{name}.log")


def main(arguments: Sequence[str]) -> int:
    parent, role, name, behaviour, *more = arguments
    print(f"{name} says hello", flush=True)
    if behaviour == "broken":
        print("baton: the frobnicator is missing", flush=True)
        return 3
    woken = threading.Event()
    stop = StopSignal(woken.set, int(parent.removeprefix("--parent-pid=")))
    if behaviour == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    takes_long = "building kernels" if role == Role.ROUTER else "loading weights"
    print(f"nobody: {takes_long} of nothing: 50 %", flush=True)
    if role == Role.ROUTER:
        serve(woken, more)
    else:
        refusal = be_worker(role, name, behaviour, woken)
        if refusal is not None:
            print(f"baton {role}: {refusal}", flush=True)
            return 2
    stop.close()
    print(f"{name} stopped in order", flush=True)
    return 0


def be_worker(role: str, name: str, behaviour: str, woken: threading.Event) -> str | None:
    info = WorkerInfo(
        worker_id=name,
        incarnation=uuid.uuid4().hex,
        role=Role(role),
        state=WorkerState.LOADING if behaviour == "loading" else WorkerState.READY,
        host="here",
        pid=os.getpid(),
        control="tcp://127.0.0.1:1",
        events="tcp://127.0.0.1:2",
        protocol_version=PROTOCOL_VERSION,
        model="nothing",
        model_fingerprint="f",
        layout_fingerprint="l",
        transport="shm",
        block_size=16,
        num_blocks=8,
        max_context=64,
        machine=machine_name(),
    )
    lease = WorkerLease(
        os.environ["REDIS"], CLUSTER, info, float(os.environ["LEASE_S"]), grace_s=0.1
    )
    lease.start()
    while not woken.wait(0.02) and lease.refusal is None:
        pass
    lease.close()
    return lease.refusal


def serve(woken: threading.Event, more: Sequence[str]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            members = read_fleet(os.environ["REDIS"], CLUSTER)
            workers = [{"worker_id": each, "connected": True} for each in members]
            body = json.dumps({"workers": workers})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            """Says nothing."""

    port = int(more[0].removeprefix("--port=")) if more else 0
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if "--port-file=none" not in more:
        partial = Path(os.environ["PORT_FILE"] + ".partial")
        partial.write_text(f"{server.server_port}\n")
        partial.rename(os.environ["PORT_FILE"])
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    woken.wait()
    server.shutdown()
    thread.join()
    server.server_close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
