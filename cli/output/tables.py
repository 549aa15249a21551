"""The table of a fleet's workers in a terminal, from a router's answer or from registrations."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from console.telemetry.rank_texts import bubbles_text, layout_text
from console.telemetry.tier_texts import tiers_text
from process.number_text import integer

WIDEST = 500
MAX_US = 1 << 55
"""Times further in the future, in microseconds of the Unix epoch, are not shown."""

_Column = tuple[str, str]
"""A heading, and the key of the value that a row shows below it."""

_WHO: tuple[_Column, ...] = (
    ("WORKER", "worker_id"),
    ("ROLE", "role"),
    ("STATE", "state"),
    ("MODEL", "model"),
    ("TRANSPORT", "transport"),
)
_LOAD: tuple[_Column, ...] = (
    ("KV BLOCKS", "blocks_total"),
    ("USED", "blocks_used"),
    ("CACHED", "blocks_cached"),
    ("RUNNING", "num_running"),
    ("WAITING", "num_waiting"),
    ("QUEUED TOKENS", "queued_tokens"),
)
_RANKS: tuple[_Column, ...] = (("RANKS", "tensor_parallel"),)
_BUBBLES: tuple[_Column, ...] = (("BUBBLES", "bubbles"),)
_TIERS: tuple[_Column, ...] = (("TIERS", "tiers"),)
_WHERE: tuple[_Column, ...] = (("HOST", "host"), ("PID", "pid"))


def print_table(console: Console, table: Table) -> None:
    """Print a table: in a terminal its cells fold to fit, otherwise it has its natural width."""
    width = console.width
    try:
        if not console.is_terminal:
            console.width = WIDEST
        console.print(table, crop=False, soft_wrap=False)
    finally:
        console.width = width


def print_workers(console: Console, workers: Iterable[Mapping[str, Any]], with_load: bool) -> None:
    """Print the table of workers; a narrow terminal gets two tables, one below the other."""
    rows = list(workers)
    tables = [workers_table(rows, with_load)]
    if console.is_terminal and _natural_width(console, tables[0]) > console.width:
        load = _load_columns(rows, with_load)
        tables = [_table(rows, columns) for columns in (_WHO + _WHERE, _WHO[:1] + load)]
    for number, table in enumerate(tables):
        if number:
            console.print()
        print_table(console, table)


def workers_table(workers: Iterable[Mapping[str, Any]], with_load: bool) -> Table:
    """A table of workers as `GET /fleet` lists them; without load, only registration data."""
    rows = list(workers)
    return _table(rows, _WHO + _load_columns(rows, with_load) + _WHERE)


def _load_columns(workers: Sequence[Mapping[str, Any]], with_load: bool) -> tuple[_Column, ...]:
    """The columns of ranks and load; those of ranks and tiers only where a worker has some."""
    ranks = _RANKS if any(layout_text(each) != "1" for each in workers) else ()
    if not with_load:
        return ranks + _LOAD[:1]
    if any(each.get("pipeline_parallel", 1) > 1 for each in workers):
        ranks += _BUBBLES
    return ranks + _LOAD + (_TIERS if any(map(tiers_text, workers)) else ())


def state_of(worker: Mapping[str, Any]) -> str:
    """A worker's state in one word. An unusable worker has the condition that the asked router
    sees; otherwise, or if no router was asked, the state is that of its registration."""
    condition = _condition(worker).get("state", "usable")
    return str(worker["state"] if condition == "usable" else condition)


def complaint(worker: Mapping[str, Any]) -> str | None:
    """Why a router does not use a worker, and since when. None if the router uses it, or if another
    worker has taken its place."""
    condition = _condition(worker)
    state, reason = condition.get("state"), condition.get("reason")
    if not condition.get("cause") or condition.get("is_replaced"):
        return None
    return f"{worker['worker_id']} is {state}{_since(condition.get('since_us'))}: {reason}"


def _since(at_us: object) -> str:
    if not isinstance(at_us, int) or not 0 < at_us < MAX_US:
        return ""
    since = datetime.datetime.fromtimestamp(at_us / 1e6, datetime.UTC)
    return f" since {since:%H:%M:%S} UTC"


def _condition(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    condition = worker.get("condition")
    return condition if isinstance(condition, dict) else {}


def _table(workers: Iterable[Mapping[str, Any]], columns: Sequence[_Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, key in columns:
        is_load = (heading, key) in _LOAD
        table.add_column(
            heading, justify="right" if is_load else "left", no_wrap=True, overflow="fold"
        )
    for worker in sorted(workers, key=lambda each: (each["role"], each["worker_id"])):
        table.add_row(*(_cell(worker, key) for _, key in columns))
    return table


def _cell(worker: Mapping[str, Any], key: str) -> str:
    if key == "tiers":
        return tiers_text(worker)
    if key == "bubbles":
        return bubbles_text(worker)
    if key == "tensor_parallel":
        return layout_text(worker)
    value = worker[key]
    if key == "transport":  # with the best path; an older router reports no paths
        return ": ".join([value, *worker.get("transport_paths", ())[:1]])
    if key == "state":
        return state_of(worker)
    return integer(value) if isinstance(value, int) and key != "pid" else str(value)


def _natural_width(console: Console, table: Table) -> int:
    """The width in characters that the table takes if there is room."""
    options = console.options.update(width=WIDEST)
    return Measurement.get(console, options, table).maximum
