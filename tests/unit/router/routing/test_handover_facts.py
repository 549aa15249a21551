"""Which registrations show that one worker cannot hand over to another."""

from __future__ import annotations

from typing import Any

import pytest

from router.routing.handover_facts import facts_of, why_apart
from tests.registration import registration

NIXL = {"transport": "nixl"}


def why(source: dict[str, Any], sink: dict[str, Any]) -> str:
    return why_apart(facts_of(registration("p", **source)), facts_of(registration("d", **sink)))


@pytest.mark.parametrize(
    ("source", "sink"),
    [
        ({}, {}),
        ({"machine": "boot/1"}, {"machine": "boot/2"}),  # containers of one host
        ({"machine": "boot/1"}, {"machine": ""}),
        (NIXL | {"machine": "a/1"}, NIXL | {"machine": "b/1"}),
        (NIXL | {"transport_paths": ("TCP",)}, NIXL),
        (NIXL | {"transport_paths": ("CMA", "TCP")}, NIXL | {"transport_paths": ("CMA",)}),
        (
            NIXL | {"transport_paths": ("RDMA", "TCP"), "machine": "a/1"},
            NIXL | {"transport_paths": ("CUDA IPC", "RDMA"), "machine": "b/1"},
        ),
    ],
)
def test_what_may_work_is_not_ruled_out(source: dict[str, Any], sink: dict[str, Any]) -> None:
    assert why(source, sink) == why(sink, source) == ""


@pytest.mark.parametrize(
    ("source", "sink", "reason"),
    [
        (NIXL, {}, "its transport is nixl, not shm"),
        ({"layout_fingerprint": "a"}, {}, "its KV layout fingerprint is a, not l"),
        ({"protocol_version": 1}, {"protocol_version": 2}, "its protocol version is 1, not 2"),
        ({"machine": "a/1"}, {"machine": "b/1"}, "shared memory does not leave its host"),
        (
            NIXL | {"transport_paths": ("TCP",)},
            NIXL | {"transport_paths": ("RDMA", "CMA")},
            "its paths (TCP) and those there (RDMA, CMA) have none in common: see UCX_TLS",
        ),
        (
            NIXL | {"transport_paths": ("CMA",), "machine": "a/1"},
            NIXL | {"transport_paths": ("CMA",), "machine": "b/1"},
            "have none in common between hosts",
        ),
    ],
)
def test_what_certainly_fails_is_named(
    source: dict[str, Any], sink: dict[str, Any], reason: str
) -> None:
    assert reason in why(source, sink)
    assert why(sink, source)
