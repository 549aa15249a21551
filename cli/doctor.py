"""`baton doctor`: what is wrong with a fleet, by which evidence, and what to change.

Prints what the dashboard's Doctor shows. Exit code 0: nothing was found; 1: there are findings, or
a pool is short; 3: a router was not reached, or knows of no fault and has too few requests to judge
speed.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from cli.http_json import RouterAccess, get_json, reading_answers, router_root
from cli.output.terminal_text import plain_console, shown_json
from cli.status import StatusSettings
from console.doctor.doctor import Doctor
from console.doctor.observation import MIN_REQUESTS, Observation
from process.settings import setting, setting_of, settings_or_exit
from protocol.addresses import shown_address
from protocol.errors import ConfigError, ServiceError

FOUND, UNKNOWN = 1, 3
_TROUBLED = ("bad", "warn")
_CALM = {"tone": "ok"}
"""The headline of a recorded observation, which has no headline of its own."""
_STYLES = {"urgent": "bold red", "soon": "bold yellow"}


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Settings of `baton doctor`."""

    router_url: str = setting_of(StatusSettings, "router_url")
    admin_key: str | None = setting_of(StatusSettings, "admin_key")
    cert_file: str | None = setting_of(StatusSettings, "cert_file")
    timeout_s: float = setting_of(StatusSettings, "timeout_s")
    json: bool = setting(False, help="print JSON instead of words")
    save: str | None = setting(
        None, help="also write what the router looked at to this file, to examine it elsewhere"
    )
    observation: str | None = setting(
        None, help="examine a file that `--save` wrote, instead of a running fleet"
    )


def main(argv: Sequence[str]) -> int:
    """Print the diagnosis. Raises ConfigError for a file that cannot be read or written."""
    settings = settings_or_exit(
        DoctorSettings,
        argv,
        prog="baton doctor",
        description="What is wrong with a fleet, by which evidence, and what to change.",
    )
    try:
        diagnosis = _diagnosis(settings)
        if settings.save is not None:
            _save(settings, settings.save)
        with reading_answers(settings.router_url):
            return _show(settings, diagnosis)
    except ServiceError as error:
        print(f"baton doctor: {error}", file=sys.stderr)
        return UNKNOWN


def _show(settings: DoctorSettings, diagnosis: Mapping[str, Any]) -> int:
    """Print the diagnosis; returns the exit status."""
    if settings.json:
        print(json.dumps(diagnosis, indent=2))
    else:
        _print(plain_console(soft_wrap=False), diagnosis)
    if diagnosis["findings"] or diagnosis.get("headline", _CALM)["tone"] == "bad":
        return FOUND
    return 0 if diagnosis["is_conclusive"] else UNKNOWN


def _diagnosis(settings: DoctorSettings) -> dict[str, Any]:
    """The body of `/doctor`, from a router or from a file. Raises ServiceError, ConfigError."""
    if settings.observation is not None:
        return _examined(settings.observation)
    diagnosis = _get(settings, "/doctor")
    if not isinstance(diagnosis, dict) or "findings" not in diagnosis:
        raise ServiceError(
            f"{shown_address(settings.router_url)} has no findings: is it a router of this version?"
        )
    return diagnosis


def _examined(path: str) -> dict[str, Any]:
    try:
        seen = msgspec.json.decode(Path(path).read_bytes(), type=Observation)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not an observation of this version: {error}") from error
    examination = Doctor(unexplained_s=0.0).examine(seen).as_json(seen.window_s, seen.now_us)
    shown: dict[str, Any] = shown_json(examination)
    return shown | {
        "num_requests": len(seen.requests),
        "min_requests": MIN_REQUESTS,
    }


def _save(settings: DoctorSettings, path: str) -> None:
    """Write what the router's last examination looked at. Raises ServiceError, ConfigError."""
    text = json.dumps(_get(settings, "/doctor/observation"))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _get(settings: DoctorSettings, path: str) -> Any:
    access = RouterAccess(settings.admin_key, settings.cert_file)
    return get_json(f"{router_root(settings.router_url)}{path}", settings.timeout_s, access)


def _print(console: Console, diagnosis: Mapping[str, Any]) -> None:
    minutes = diagnosis["window_s"] / 60
    findings, passed = diagnosis["findings"], diagnosis["passed"]
    headline = diagnosis.get("headline", _CALM)
    is_troubled = not findings and headline["tone"] in _TROUBLED
    if is_troubled:
        console.print(f"{headline['text']}. {headline['cause'] or ''}")
    if not diagnosis["is_conclusive"]:
        console.print(
            f"{'No fault is known' if not findings else 'Facts only'}: judgements of speed need "
            f"{diagnosis['min_requests']} requests within {minutes:g} minutes, and there are "
            f"{diagnosis['num_requests']}."
        )
    elif not findings:
        verdict = "" if is_troubled else "The fleet is healthy: "
        console.print(f"{verdict}{len(passed)} checks over the last {minutes:g} minutes found "
                      "nothing.")  # fmt: skip
    else:
        plural = "" if len(findings) == 1 else "s"
        console.print(f"{len(findings)} finding{plural}, {len(passed)} checks passed, from the "
                      f"last {minutes:g} minutes")  # fmt: skip
    for finding in findings:
        _print_finding(console, finding)
    console.print()
    for each in passed:
        console.print(Text.assemble(("✓ ", "green"), each["title"], (f"  {each['text']}", "dim")))


def _print_finding(console: Console, finding: Mapping[str, Any]) -> None:
    since = datetime.datetime.fromtimestamp(finding["since_us"] / 1e6, datetime.UTC)
    console.print()
    console.print(
        Text.assemble(
            (finding["urgency"], _STYLES[finding["urgency"]]),
            f" since {since:%H:%M:%S} UTC · {finding['rule']}\n",
            (finding["title"], "bold"),
        )
    )
    evidence = finding["evidence"]
    for paragraph in finding["text"]:
        console.print(Padding(Text(paragraph), (0, 0, 0, 2)))
    for bar in evidence["bars"]:
        mark = " ◀" if bar["is_flagged"] else ""
        console.print(Text(f"    {bar['name']:<24} {bar['value']:g} {evidence['unit']}{mark}"))
    numbers = "   ".join(f"{each['name']} {each['value']}" for each in evidence["numbers"])
    if numbers:
        console.print(Text(f"    {numbers}", style="dim"))
    for change in finding["changes"]:
        console.print(Padding(Text.assemble("→ ", (_change(change), "bold"), f"  {change['text']}"),
                              (0, 0, 0, 2)))  # fmt: skip


def _change(change: Mapping[str, Any]) -> str:
    old, new = change["old"], change["new"]
    if new is None:
        return str(change["setting"])
    return f"{change['setting']} {old + ' → ' if old is not None else '= '}{new}"
