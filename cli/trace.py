"""`baton trace ID`: where one request's time went, as a file that Perfetto opens.

`baton trace --process=NAME` writes the last minutes of a worker, or of all processes.
"""

from __future__ import annotations

import json
import sys
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.arguments import split_names
from cli.http_json import RouterAccess, get_json, reading_answers, router_root
from cli.output.tables import print_table
from cli.output.terminal_text import plain_console
from cli.output.time_table import time_table
from cli.status import StatusSettings
from console.telemetry.perfetto import perfetto_flight, perfetto_trace
from process.settings import setting, setting_of, settings_or_exit
from protocol.errors import ConfigError, ServiceError

PERFETTO = "https://ui.perfetto.dev"
ROUTER, ALL = "router", "all"
MARGIN_US = 100_000
"""Recorders are asked for events up to this long before and after the request's own time."""


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """Settings of `baton trace`."""

    router_url: str = setting_of(StatusSettings, "router_url")
    admin_key: str | None = setting_of(StatusSettings, "admin_key")
    cert_file: str | None = setting_of(StatusSettings, "cert_file")
    timeout_s: float = setting_of(StatusSettings, "timeout_s", default=15.0)
    process: str | None = setting(
        None,
        help="instead of a request's trace, write what the flight recorder of this process holds: "
        "a worker's id, `router`, or `all`",
    )
    out: str | None = setting(None, help="file to write; none: ID.trace.json in this folder")


def main(argv: Sequence[str]) -> int:
    """Write a request's trace and print its table, or write what recorders hold. Raises
    ConfigError, and ServiceError if nothing could be read or written."""
    flags, names = split_names(TraceSettings, argv)
    settings = settings_or_exit(
        TraceSettings,
        flags,
        prog="baton trace ID",
        description="Where one request's time went, also as a file for Perfetto.",
    )
    if len(names) != (settings.process is None):
        raise ConfigError("name one request by its x-baton-request-id, or a process by --process")
    fleet = _Fleet(settings)
    with reading_answers(settings.router_url):
        if settings.process is not None:
            return _write_flight(settings, fleet)
        return _write_trace(settings, fleet, names[0])


class _Fleet:
    """Requests and flight recorders, read from a router."""

    def __init__(self, settings: TraceSettings) -> None:
        self._url = router_root(settings.router_url)
        self._timeout_s = settings.timeout_s
        self._access = RouterAccess(settings.admin_key, settings.cert_file)

    def get(self, path: str, **query: object) -> Any:
        """The JSON at a path. Raises ServiceError."""
        given = f"?{urllib.parse.urlencode(query)}" if query else ""
        return get_json(f"{self._url}{path}{given}", self._timeout_s, self._access)

    def processes(self) -> list[str]:
        """The router, and the workers that it is connected to."""
        workers = self.get("/fleet")["workers"]
        return [ROUTER, *(each["worker_id"] for each in workers if each["connected"])]


def _write_flight(settings: TraceSettings, fleet: _Fleet) -> int:
    assert settings.process is not None
    if settings.process == ALL:
        records = _records(fleet, fleet.processes())
    else:
        records = [fleet.get("/flight", process=settings.process)]
    return _write(settings, settings.process, perfetto_flight(records))


def _write_trace(settings: TraceSettings, fleet: _Fleet, request_id: str) -> int:
    trace = fleet.get(f"/requests/{urllib.parse.quote(request_id, safe='')}/trace")
    status = _write(settings, request_id, perfetto_trace(trace, _records_of(trace, fleet)))
    if not status and trace["attempts"]:
        print_table(plain_console(), time_table(trace))
    elif not status and trace.get("error"):
        print(f"{request_id} was refused before workers were chosen: {trace['error']}")
    return status


def _records_of(trace: dict[str, Any], fleet: _Fleet) -> list[dict[str, Any]]:
    """The events of the request's time in the recorders of its workers."""
    around: dict[str, object] = {
        "request_id": trace["request_id"],
        "since_us": trace["received_us"] - MARGIN_US,
        "until_us": trace["finished_us"] + MARGIN_US if trace["finished_us"] else 0,
    }
    return _records(fleet, _workers_of(trace), **around)


def _records(fleet: _Fleet, names: Sequence[str], **query: object) -> list[dict[str, Any]]:
    """The recorders of these processes. A process that is gone, or does not answer, is named and
    left out."""
    records = []
    for name in names:
        try:
            records.append(fleet.get("/flight", process=name, **query))
        except ServiceError as error:
            print(f"baton trace: without the recorder of {name}: {error}", file=sys.stderr)
    return records


def _workers_of(trace: dict[str, Any]) -> list[str]:
    placements = [each["placement"] for each in trace["attempts"]]
    named = [each[role] for each in placements for role in ("prefill", "decode")]
    return list(dict.fromkeys(name for name in named if name))


def _write(settings: TraceSettings, name: str, content: dict[str, Any]) -> int:
    """Write the file, and say where; returns the exit status."""
    path = Path(settings.out or f"{name}.trace.json")
    try:
        path.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        print(f"baton trace: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{path}: open it at {PERFETTO}")
    return 0
