"""A script that runs inside a pod's namespaces: a store, a worker, and what can be seen of it.

`pod_worker.py FLAGS...` prints a JSON object: the worker's registration, the answers of its probes
once it is ready, its listening TCP ports, and its exit status after SIGHUP and SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import psutil

from process.store.embedded_valkey import EmbeddedValkey
from process.store.fleet_watcher import read_fleet

METRICS_PORT = 9100
WAIT_S = 120.0


def status_of(path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}{path}") as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def wait_for(condition: Callable[[], bool], worker: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert worker.poll() is None, f"it ended with {worker.returncode}"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def main() -> None:
    with EmbeddedValkey() as valkey:
        secrets = {"BATON_REDIS_URL": f"{valkey.url}\n", "BATON_CLUSTER_SECRET": "x" * 20}
        command = [sys.executable, "-P", "-m", "cli", "decode", *sys.argv[1:]]
        flags = ["--worker-id=d1", f"--metrics-port={METRICS_PORT}"]
        worker = subprocess.Popen([*command, *flags], env={**os.environ, **secrets})
        wait_for(lambda: status_of("/live") == 200, worker)
        early = {path: status_of(path) for path in ("/startup", "/ready")}
        wait_for(lambda: status_of("/ready") == 200, worker)
        info = read_fleet(valkey.url, "default")["d1"]
        connections = psutil.Process(worker.pid).net_connections("tcp")
        seen = {
            "early": early,
            "probes": {path: status_of(path) for path in ("/startup", "/ready", "/live", "/x")},
            "control": info.control,
            "events": info.events,
            "num_blocks": info.num_blocks,
            "ports": sorted({each.laddr.port for each in connections if each.status == "LISTEN"}),
        }
        worker.send_signal(signal.SIGHUP)
        worker.send_signal(signal.SIGTERM)
        seen["status"] = worker.wait(WAIT_S)
        seen["left"] = not read_fleet(valkey.url, "default")
        print(json.dumps(seen))


if __name__ == "__main__":
    main()
