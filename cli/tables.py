"""How a fleet looks in a terminal: one table of workers, whatever the numbers' source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

WIDEST = 500


def print_table(console: Console, table: Table) -> None:
    """Print a table at its natural width: a narrow terminal wraps it, nothing is cut off."""
    width, console.width = console.width, WIDEST
    try:
        console.print(table, crop=False)
    finally:
        console.width = width


def workers_table(workers: Iterable[Mapping[str, Any]], with_load: bool) -> Table:
    """Rows as `GET /fleet` gives them; without load only what registrations say."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("WORKER", "ROLE", "STATE", "MODEL", "TRANSPORT"):
        table.add_column(heading, no_wrap=True)
    headings = ("KV BLOCKS", "USED", "CACHED", "RUNNING", "WAITING", "QUEUED TOKENS")
    for heading in headings if with_load else headings[:1]:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("HOST", "PID"):
        table.add_column(heading, no_wrap=True)
    for worker in sorted(workers, key=lambda each: (each["role"], each["worker_id"])):
        table.add_row(*_cells(worker, with_load))
    return table


def _cells(worker: Mapping[str, Any], with_load: bool) -> list[str]:
    state = str(worker["state"])
    if not worker.get("connected", True):
        state += ", not connected"
    load = ["blocks_total"]
    if with_load:
        load += ["blocks_used", "blocks_cached", "num_running", "num_waiting", "queued_tokens"]
    return [
        str(worker["worker_id"]),
        str(worker["role"]),
        state,
        str(worker["model"]),
        str(worker["transport"]),
        *(f"{worker[name]:,}" for name in load),
        str(worker["host"]),
        str(worker["pid"]),
    ]
