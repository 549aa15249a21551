"""Generates the parts of the chart's schema and of its documentation that follow from the code:
`python scripts/chart_values.py`.

The settings that `settings:` of routers and pools accept go from the processes' declarations into
`values.schema.json`; the schema and the defaults of `values.yaml` become docs/kubernetes-values.md.
A test compares both files with what this script would write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from decode_worker.settings import DecodeSettings
from process.settings.spec import SettingSpec, specs_of
from router_process.settings import RouterSettings
from worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy/helm/baton"
SCHEMA, VALUES = CHART / "values.schema.json", CHART / "values.yaml"
DOCUMENT = ROOT / "docs/kubernetes-values.md"

CHART_SETS = frozenset(
    [
        *("nnodes", "node_rank", "master_addr", "master_port", "join_s"),
        *("model", "served_model_name", "cluster", "host", "log_level", "log_format"),
        *("port", "port_file", "tls_cert_file", "tls_key_file", "api_key_file", "admin_key_file"),
        *(
            "revision",
            "request_timeout_s",
            "lame_duck_s",
            "shutdown_grace_s",
            "parent_pid",
            "worker_id",
        ),
        *("device", "advertise_address", "control_port", "events_port", "metrics_port"),
        "probe_port",
        *("tensor_parallel", "pipeline_parallel"),
        *("peer_tensor_parallel", "peer_pipeline_parallel"),
        *("host_tier_bytes", "disk_tier_bytes", "disk_tier_dir"),
        *("metrics_host", "kv_interface", "allow_kv_over_tcp", "kv_ports"),
        *("request_deadline_s", "drain_grace_s", "require_prefill", "pod_name", "pod_uid"),
        "pod_conditions",
        *("redis_ca_file", "redis_cert_file", "redis_key_file"),
    ]
)
"""Settings that the chart derives from its own values."""

_TABLE = ("| value | default | unit | meaning |", "|---|---|---|---|")
_UNIT = "x-unit"
"""Our keyword of the schema for a number's unit; validators ignore it."""
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_HEAD = (
    "# Values of the chart\n\n"
    "Every value of `deploy/helm/baton`, with its default. This page is generated from "
    "`values.schema.json` and `values.yaml` by `python scripts/chart_values.py`. "
    "[kubernetes.md](kubernetes.md) explains how the values work together.\n\n"
    "Leave a value out to get its default: `null`, or a section with nothing in it, takes the "
    "default away, and where the chart needs one, Helm answers `missing property`.\n\n"
    "A value of `workers` holds for all pools, and a pool in `pools` overrides it. The settings "
    "that `router.settings`, `workers.settings` and `pools.NAME.settings` accept are at the end.\n"
)


def main() -> None:
    """Write both files."""
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    DOCUMENT.write_text(document_text(), encoding="utf-8")


def schema_text() -> str:
    """The schema with the settings that the code declares now."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["$defs"] |= {
        "routerSettings": settings_schema(RouterSettings),
        "workerSettings": settings_schema(WorkerSettings),
        "decodeSettings": settings_schema(DecodeSettings),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def settings_schema(cls: type) -> dict[str, Any]:
    """The schema of a map of settings of one process, without those that the chart sets."""
    properties = {
        name: _setting_schema(spec)
        for name, spec in specs_of(cls).items()
        if name not in CHART_SETS and spec.details.flag and not spec.details.secret
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _setting_schema(spec: SettingSpec) -> dict[str, Any]:
    details = spec.details
    schema: dict[str, Any] = {"description": details.help}
    if details.unit:
        schema[_UNIT] = details.unit
    if spec.base is tuple:
        item = {"type": "string"} | (
            {"pattern": _whole(details.pattern)} if details.pattern else {}
        )
        return schema | {"type": "array", "items": item}
    schema["type"] = _TYPES[spec.base]
    if spec.choices:
        schema["enum"] = list(spec.choices)
    if details.minimum is not None:
        schema["minimum"] = details.minimum
    if details.maximum is not None:
        schema["maximum"] = details.maximum
    if details.pattern:
        schema["pattern"] = _whole(details.pattern)
    return schema


def _whole(pattern: str) -> str:
    return f"^(?:{pattern})$"


def document_text() -> str:
    """The page of all values."""
    schema = json.loads(schema_text())
    values = yaml.safe_load(VALUES.read_text(encoding="utf-8"))
    lines = [_HEAD]
    parts = {name: part for name, part in schema["properties"].items() if name != "global"}
    groups = {name: part for name, part in parts.items() if name == "pools" or "properties" in part}
    single = [
        row
        for name in parts.keys() - groups.keys()
        for row in _rows(schema, parts[name], name, values[name])
    ]
    lines += ["## Of the whole release", "", *_TABLE, *sorted(single), ""]
    for name, part in groups.items():
        lines += [f"## {name}", "", part["description"], ""]
        lines += [*_TABLE, *_rows(schema, part, name, values[name]), ""]
    for name, title in (
        ("routerSettings", "router.settings"),
        ("decodeSettings", "settings of workers"),
    ):
        lines += [f"## {title}", "", *_setting_rows(schema["$defs"], name), ""]
    return "\n".join(lines).rstrip() + "\n"


def _rows(
    schema: Mapping[str, Any], part: Mapping[str, Any], path: str, default: Any
) -> Iterator[str]:
    if part.get("properties") and "$ref" not in part:
        for name, inner in part["properties"].items():
            value = default.get(name) if isinstance(default, dict) else None
            yield from _rows(schema, inner, f"{path}.{name}", value)
        return
    if path == "pools":
        role = schema["$defs"]["pool"]["properties"]["role"]
        yield f"| `pools.NAME.role` | | | {_cell(role)} Required. |"
        yield "| `pools.NAME.*` | as in `workers` | | Any value of `workers`, for this pool. |"
        return
    yield f"| `{path}` | `{json.dumps(default, ensure_ascii=False)}` | {_unit(part)}{_cell(part)} |"


def _cell(part: Mapping[str, Any]) -> str:
    choices = [each for each in part.get("enum", ()) if each]
    text = part["description"]
    if choices:
        text = f"{text.removesuffix('.')}. One of {', '.join(f'`{each}`' for each in choices)}."
    return text.replace("|", "\\|")


def _unit(part: Mapping[str, Any]) -> str:
    return f"{part[_UNIT]} | " if _UNIT in part else "| "


def _setting_rows(defs: Mapping[str, Any], name: str) -> list[str]:
    worker = defs["workerSettings"]["properties"]
    rows = ["| setting | unit | meaning |", "|---|---|---|"]
    for key, part in defs[name]["properties"].items():
        only = " (decode workers only)" if name == "decodeSettings" and key not in worker else ""
        rows.append(f"| `{key}` | {_unit(part)}{_cell(part)}{only} |")
    return rows


if __name__ == "__main__":
    main()
