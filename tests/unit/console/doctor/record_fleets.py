"""Records what routers see of real fleets with one planted fault each, for `test_recorded_fleets`.

`python -m tests.unit.console.doctor.record_fleets [NAME ...]` starts each fleet as `baton up` does,
on the demo model, puts load on it, plants the fault, and writes the observation of the router's
doctor to `recorded/NAME.json.gz`. Half a minute each, on a machine with nothing else to do.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.child_settings import ChildSettings
from cli.fleet import Fleet
from cli.up_settings import UpSettings
from console.doctor.observation import MIN_REQUESTS
from tests.http_client import HTTP
from tests.paths import DEMO_MODEL

FOLDER = Path(__file__).parent / "recorded"
SECONDS = 32.0
THROTTLE = """
import os, signal, sys, time
while True:
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.04)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(0.005)
"""
DIGITS = 3
Plant = Callable[[Fleet], "Iterator[None]"]


def nothing(fleet: Fleet) -> Iterator[None]:
    """No fault while it runs: the settings or the load are the fault, if there is one."""
    yield


def throttled(fleet: Fleet) -> Iterator[None]:
    """decode-1 stands still most of the time, as on a throttled device."""
    command = [sys.executable, "-c", THROTTLE, str(fleet.processes["decode-1"].pid)]
    with subprocess.Popen(command) as process:
        yield
        process.terminate()
    fleet.processes["decode-1"].signal(signal.SIGCONT)


def killed_again_and_again(fleet: Fleet) -> Iterator[None]:
    """decode-1 is killed whenever it is ready; `baton up` starts it again."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(1.0):
            workers = HTTP.get(f"{fleet.url}/fleet").json()["workers"]
            (state,) = [e["state"] for e in workers if e["worker_id"] == "decode-1"]
            if state == "ready":
                fleet.processes["decode-1"].signal(signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    over.set()
    thread.join()


@dataclass(frozen=True)
class Load:
    """What clients send: one prompt after the other on each of `num_clients` connections."""

    num_clients: int = 2
    prompts: tuple[int, ...] = (120, 200, 280)
    outputs: tuple[int, ...] = (16, 24)
    num_prefixes: int = 4
    prefix: int = 64
    pause_s: float = 0.1


@dataclass(frozen=True)
class Recipe:
    """A fleet and its load; `expected` is the rule that must find something, None for none."""

    expected: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    load: Load = Load()
    plant: Plant = nothing


RECIPES = {
    "healthy": Recipe(None),
    "prefill_short": Recipe(
        "pool_balance",
        {"prefill": 1, "decode": 2, "chunk_max_tokens": 64},
        {"BATON_TTFT_TARGET_MS": "250"},
        Load(num_clients=16, prompts=(600, 800), outputs=(4,), num_prefixes=64, prefix=0,
             pause_s=0.0),
    ),
    "decode_places": Recipe(
        "pool_balance",
        {"prefill": 1, "decode": 1, "max_batch_size": 1},
        {"BATON_TTFT_TARGET_MS": "100"},
        Load(num_clients=10, prompts=(40,), outputs=(64,), pause_s=0.0),
    ),
    "memory_full": Recipe(
        "memory_full",
        {"prefill": 1, "decode": 1, "num_blocks": 56, "max_context": 512},
        {},
        Load(num_clients=12, prompts=(200, 240), outputs=(120,), prefix=0, pause_s=0.0),
    ),
    "slow_worker": Recipe(
        "slow_worker", {"prefill": 1, "decode": 3}, {}, Load(num_clients=4), throttled
    ),
    "faults": Recipe(
        "faults", {"prefill": 1, "decode": 2}, {}, Load(num_clients=3), killed_again_and_again
    ),
    "targets": Recipe("targets", {}, {"BATON_TPOT_TARGET_MS": "0.1"}),
    "stalls": Recipe(
        "stalls",
        {"prefill": 0, "decode": 1, "chunk_max_tokens": 128, "itl_target_ms": 1000.0},
        {},
        Load(num_clients=6, prompts=(20, 900), outputs=(30,), prefix=0, num_prefixes=99),
    ),
    "cache_thrash": Recipe(
        "cache_thrash",
        {"prefill": 0, "decode": 1, "num_blocks": 330, "max_context": 1024},
        {},
        Load(num_clients=1, prompts=(420,), outputs=(2,), num_prefixes=18, prefix=400),
    ),
}  # fmt: skip


def record(name: str) -> None:
    """Run one recipe and write its observation."""
    recipe = RECIPES[name]
    with _running(recipe) as fleet:
        planting = recipe.plant(fleet)
        next(planting)
        _load(fleet, recipe.load)
        next(planting, None)
        seen = _observation(fleet)
        found = HTTP.get(f"{fleet.url}/doctor").raise_for_status().json()
    rules = [each["rule"] for each in found["findings"]]
    print(f"{name}: {len(seen['requests'])} requests, found {rules}, expected {recipe.expected}")
    FOLDER.mkdir(exist_ok=True)
    content = json.dumps(_rounded(seen)).encode()
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(content, mtime=0))


@contextmanager
def _running(recipe: Recipe) -> Iterator[Fleet]:
    usual = {"model": str(DEMO_MODEL), "port": 0, "prefill": 2, "decode": 2, "num_blocks": 2048}
    chosen = UpSettings(**(usual | recipe.settings))
    children = ChildSettings(chosen, frozenset(usual | recipe.settings), _environ(recipe))
    with Fleet(chosen, children) as fleet:
        over = threading.Event()
        watcher = threading.Thread(target=_watch, args=(fleet, over))
        watcher.start()
        try:
            yield fleet
        finally:
            over.set()
            watcher.join()


def _environ(recipe: Recipe) -> dict[str, str]:
    return {**os.environ, **recipe.environment}


def _watch(fleet: Fleet, over: threading.Event) -> None:
    """Start again what ended, as `baton up` does."""
    while not over.wait(0.1):
        fleet.check()


def _load(fleet: Fleet, load: Load) -> None:
    over = time.monotonic() + SECONDS

    def client(number: int) -> None:
        i = number
        while time.monotonic() < over:
            i += load.num_clients
            start = 3 + 37 * (i % load.num_prefixes)
            length = load.prompts[i % len(load.prompts)]
            prefix = [(start + 11 * k) % 900 + 20 for k in range(load.prefix)]
            rest = [(i * 31 + 7 * k) % 900 + 20 for k in range(length - load.prefix)]
            _complete(fleet, prefix + rest, load.outputs[i % len(load.outputs)])
            time.sleep(load.pause_s)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(load.num_clients)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def _complete(fleet: Fleet, prompt: list[int], max_tokens: int) -> None:
    body = {
        "model": DEMO_MODEL.name, "prompt": prompt, "ignore_eos": True, "max_tokens": max_tokens,
        "stream": True,
    }  # fmt: skip
    with HTTP.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=120) as reply:
        reply.read()


def _observation(fleet: Fleet) -> dict[str, Any]:
    """The first observation after the load that has enough requests."""
    for _ in range(40):
        time.sleep(0.5)
        answer = HTTP.get(f"{fleet.url}/doctor/observation")
        if answer.status_code == 200 and len(answer.json()["requests"]) >= MIN_REQUESTS:
            return dict(answer.json())
    raise SystemExit(f"fewer than {MIN_REQUESTS} requests ended: the machine is too slow")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    """Record the named fleets, or all."""
    for name in sys.argv[1:] or RECIPES:
        record(name)


if __name__ == "__main__":
    main()
