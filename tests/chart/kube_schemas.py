"""Strict validation of objects against a version of Kubernetes, with each schema compiled once.

The schemas of built-in kinds are those of `kubernetes-validate`; those of custom resources lie in
`schemas/`, written from the definitions that each file's `$comment` names.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate

_BUILT_IN = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
_CUSTOM = Path(__file__).parent / "schemas"


def problems(found: dict[str, Any], version: str) -> list[str]:
    """What is wrong with an object; KeyError for a kind that this version does not have."""
    validator = _validator(found["apiVersion"], found["kind"], version)
    return [
        f"{found['kind']}/{found['metadata']['name']} "
        f"{'.'.join(map(str, error.instance_path))}: {error.message}"
        for error in validator.iter_errors(found)
    ]


@functools.cache
def _validator(api_version: str, kind: str, version: str) -> jsonschema_rs.Draft202012Validator:
    custom = _CUSTOM / f"{kind.lower()}.json"
    if custom.exists():
        schema = json.loads(custom.read_text())
        if schema["properties"]["apiVersion"]["const"] != api_version:
            raise KeyError(f"{api_version} {kind}")
        return jsonschema_rs.Draft202012Validator(schema)
    group, _, name = api_version.rpartition("/")
    file = "-".join(part for part in (kind.lower(), group.partition(".")[0], name) if part)
    path = _BUILT_IN / f"v{version}-local-strict" / f"{file}.json"
    if not path.exists():
        raise KeyError(f"{api_version} {kind} in {version}")
    return jsonschema_rs.Draft202012Validator(
        json.loads(path.read_text()), registry=_definitions(version)
    )


@functools.cache
def _definitions(version: str) -> jsonschema_rs.Registry:
    path = _BUILT_IN / f"v{version}-local-strict" / "_definitions.json"
    return jsonschema_rs.Registry(
        [("json-schema:///api/_definitions.json", json.loads(path.read_text()))]
    )
