"""One pod or container of a rendered release."""

from __future__ import annotations

from typing import Any

from tests.chart.chart import (
    Object,
    objects,
    pod_templates,
)
from tests.chart.releases import RELEASES


def pod(values: dict[str, Any], component: str) -> Object:
    for name, found in pod_templates(objects(values)):
        if name.endswith(f"-{component}"):
            spec: Object = found["spec"]
            return spec
    raise AssertionError(f"no {component}")


def container(values: dict[str, Any], component: str) -> Object:
    (found,) = pod(values, component)["containers"]
    return dict(found)


def release(name: str) -> list[Object]:
    (values,) = [each.values for each in RELEASES if each.name == name]
    return objects(values)
