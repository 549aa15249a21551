"""`baton status`: a table of the workers, with their load as a router sees it.

If no router answers but a Redis is given, the table shows the registered workers without load.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cli.http_json import (
    RouterAccess,
    RouterUnreachable,
    get_json,
    reading_answers,
    router_root,
)
from cli.output.tables import complaint, print_workers
from cli.output.terminal_text import plain_console, shown_json
from console.telemetry.facts.facts_json import apart_line, lost_log
from console.telemetry.tier_texts import failing_tier
from process.settings import setting, setting_of, settings_or_exit
from process.store.fleet_watcher import read_fleet
from process.store.store_url import store_url
from protocol.addresses import shown_address
from protocol.errors import ServiceError
from router.fleet.worker import registered
from worker.settings import WorkerSettings

SENT_KEY_PATTERN = r"[!-~]+"
"""The form of a key that an HTTP header can carry."""


@dataclass(frozen=True, kw_only=True)
class StatusSettings:
    """Settings of `baton status`."""

    router_url: str = setting(
        "http://127.0.0.1:8000", help="a router of the fleet", pattern=r"https?://\S+"
    )
    redis_url: str | None = setting_of(
        WorkerSettings,
        "redis_url",
        default=None,
        help="Redis or Valkey that holds the fleet; asked when no router answers",
    )
    redis_ca_file: str | None = setting_of(WorkerSettings, "redis_ca_file")
    redis_cert_file: str | None = setting_of(WorkerSettings, "redis_cert_file")
    redis_key_file: str | None = setting_of(WorkerSettings, "redis_key_file")
    cluster: str = setting_of(WorkerSettings, "cluster")
    admin_key: str | None = setting(
        None,
        help="key of an operator, if the router asks for one",
        pattern=SENT_KEY_PATTERN,
        secret=True,
        flag=False,
    )
    cert_file: str | None = setting(
        None, help="the router's own certificate, a PEM file, where this host does not trust it"
    )
    timeout_s: float = setting(5.0, help="how long to wait for an answer", unit="s", minimum=0.1)
    json: bool = setting(False, help="print JSON instead of a table")


def main(argv: Sequence[str]) -> int:
    """Print the fleet. Raises ServiceError if neither a router nor Redis could be asked."""
    settings = settings_or_exit(
        StatusSettings,
        argv,
        prog="baton status",
        description="The workers of a fleet: role, state, load, KV blocks, transport.",
    )
    fleet, has_load = _ask(settings)
    if settings.json:
        print(json.dumps(fleet, indent=2))
        return 0
    with reading_answers(settings.router_url):
        _print_fleet(fleet, has_load)
    return 0


def _print_fleet(fleet: Mapping[str, Any], has_load: bool) -> None:
    if workers := fleet["workers"]:
        print_workers(plain_console(), workers, has_load)
    else:
        print("no worker is registered")
    for line in filter(None, map(complaint, workers)):
        print(line)
    _print_troubles(fleet)


def _print_troubles(fleet: Mapping[str, Any]) -> None:
    """Say what is wrong with the store, or will be soon, which logs are lost, which tiers fail, and
    which pairs cannot hand over, if the router knows."""
    store = fleet.get("store")
    said = store if isinstance(store, dict) else {}
    if trouble := said.get("trouble"):
        print(f"{trouble}; requests go on with the workers last known")
    if notice := said.get("notice"):
        print(notice)
    for each in fleet.get("logs", ()):
        print(lost_log(each))
    for each in fleet.get("tiers", ()):
        print(failing_tier(each))
    if line := apart_line(fleet.get("apart", ())):
        print(line)


def _ask(settings: StatusSettings) -> tuple[dict[str, Any], bool]:
    """The fleet as `GET /fleet` shows it, and whether its load is known. Without a router, only the
    registered workers are known. Raises ServiceError."""
    try:
        access = RouterAccess(settings.admin_key, settings.cert_file)
        url = f"{router_root(settings.router_url)}/fleet"
        return _fleet_of(url, get_json(url, settings.timeout_s, access)), True
    except RouterUnreachable as error:
        if settings.redis_url is None:
            raise RouterUnreachable(
                f"{error.message}; name one by --router-url, or the fleet's Redis by --redis-url"
            ) from error
        print(f"baton status: {error}; load is not known", file=sys.stderr)
        found = read_fleet(store_url(settings), settings.cluster, settings.timeout_s)
        workers = [shown_json(registered(info)) for info in found.values()]
        return {"workers": workers}, False


def _fleet_of(url: str, answer: Any) -> dict[str, Any]:
    """The answer, if it is a router's. Raises ServiceError."""
    if not isinstance(answer, dict) or not isinstance(answer.get("workers"), list):
        where = shown_address(url)
        raise ServiceError(f"{where} does not list workers: is it a router of this version?")
    return answer
