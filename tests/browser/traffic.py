"""A fleet for the dashboard's tests, and requests to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from cli.fleet import Fleet
from cli.up_settings import UpSettings
from tests.forked import ForkedChildren
from tests.http_client import HTTP
from tests.integration.fleets import PROMPT_REPORTS, SETTINGS, logs_on_failure, our_processes

NUM_CLIENTS = 4
BROWSERS = ("chrom", "google-chrome")
"""How the names of the browser's processes begin."""


@contextmanager
def running_fleet_for_pages(**environment: str) -> Iterator[Fleet]:
    """Two prefill and two decode workers, of which tests may kill and drain some."""
    before = _other_processes()
    settings = UpSettings(**SETTINGS, prefill=2, decode=2, chunk_max_tokens=64)
    environ = {**os.environ, **PROMPT_REPORTS, **environment}
    names = frozenset((*SETTINGS, "prefill", "decode", "chunk_max_tokens"))
    with Fleet(settings, ForkedChildren(settings, names, environ)) as fleet:
        with logs_on_failure(fleet):
            yield fleet
        fleet.stop()
    assert _other_processes() <= before, "a process was left behind"


def _other_processes() -> set[int]:
    """Our processes without the browser's, which come and go as it sees fit."""
    found = set()
    for pid in our_processes():
        with suppress(psutil.NoSuchProcess):
            if not psutil.Process(pid).name().startswith(BROWSERS):
                found.add(pid)
    return found


def send(fleet: Fleet, count: int) -> list[dict[str, Any]]:
    """Send `count` completions, some of them concurrently. Half of them have prompts of several
    chunks."""

    def one(i: int) -> dict[str, Any]:
        prompt = [3 + i, *range(5, 5 + (24 if i % 2 else 150))]
        body = {"model": "demo_model", "prompt": prompt, "max_tokens": 12, "ignore_eos": True}
        answer = HTTP.post(f"{fleet.url}/v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        return dict(answer.json())

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return list(pool.map(one, range(count)))


def metrics(fleet: Fleet) -> dict[str, float]:
    """`/metrics` by sample, labels included."""
    text = HTTP.get(f"{fleet.url}/metrics").raise_for_status().text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}
