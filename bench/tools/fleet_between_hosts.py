"""A fleet whose workers run on two hosts: started, asked once, its sockets listed, as JSON.

    python -m bench.tools.fleet_between_hosts HOST MODEL FLAG ...

Run on the first host of a `TwoHosts`; `bench.sockets` does that. The store, a decode worker and a
router run there, a prefill worker on the host in the namespace HOST. FLAGs go to both workers.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from dataclasses import astuple
from typing import Any

from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.listeners import listeners_of
from bench.tools.two_hosts import ADDRESSES
from protocol.errors import BatonError

PROMPT = list(range(10, 410))
REPORT_S = 60.0
SMALL = ("--dtype=float32", "--device=cpu", "--torch-threads=1", "--num-blocks=512")


def config_of(model: str, other_host: str, flags: list[str]) -> FleetConfig:
    """The fleet; every prompt is computed by the prefill worker."""
    home, away = ADDRESSES
    return FleetConfig(
        model,
        worker_flags=(*SMALL, *flags),
        router_flags=("--local-prefill-threshold-tokens=0",),
        role_flags={"decode": (f"--host={home}",), "prefill": (f"--host={away}",)},
        role_prefix={"prefill": ("ip", "netns", "exec", other_host)},
        store_host=home,
    )


def complete(url: str, model: str) -> dict[str, Any]:
    """The trace of one completion, once its prefill worker has said what it moved. Raises
    BatonError if it does not."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as answer:
        request_id = answer.headers["x-request-id"]
    deadline = time.monotonic() + REPORT_S
    while True:
        with urllib.request.urlopen(f"{url}/requests/{request_id}/trace", timeout=60) as answer:
            trace: dict[str, Any] = json.load(answer)
        prefill = trace["attempts"][-1]["prefill"]
        if prefill and prefill["bytes_moved"]:
            return trace
        if time.monotonic() >= deadline:
            raise BatonError(f"no worker has said in {REPORT_S:g} s what moved for {request_id}")
        time.sleep(0.05)


def main(argv: list[str]) -> int:
    """Print the listeners of each process, and how the blocks of the prompt moved."""
    other_host, model, *flags = argv
    with BenchFleet(config_of(model, other_host, flags)) as fleet:
        name = fleet.workers("router-1")["decode-1"]["model"]
        prefill = complete(fleet.url("router-1"), name)["attempts"][-1]["prefill"]
        pids = fleet.pids | {"store": fleet.valkey.pid}
        listeners = {name: [astuple(each) for each in listeners_of(pids[name])] for name in pids}
    moved = {name: prefill[name] for name in ("transport", "bytes_moved")}
    print(json.dumps({"listeners": listeners, **moved}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
