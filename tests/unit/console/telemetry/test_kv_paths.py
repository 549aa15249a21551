"""Which way KV took: named only where the counters say so."""

from __future__ import annotations

import pytest

from console.telemetry.kv_path_watch import PathWatch
from console.telemetry.kv_paths import (
    expected_path,
    is_below_way,
    is_off_way,
    measured_path,
    narrowed,
)
from protocol.registration import WorkerInfo
from tests.registration import registration

MB = 1 << 20


def info(worker_id: str, machine: str = "m1", address: str = "10.0.0.1", **fields) -> WorkerInfo:
    known = {
        "machine": machine, "host": machine, "transport": "nixl",
        "control": f"tcp://{address}:5000", "transport_paths": ("RDMA", "CMA", "TCP"),
    }  # fmt: skip
    return registration(worker_id, **(known | fields))


HERE, THERE = info("p1"), info("d1", "m2", "10.0.0.2")
BESIDE = info("d2")


@pytest.mark.parametrize(
    ("target", "links", "moved", "path"),
    [
        (THERE, {"tcp:": 0, "tcp:10.0.0.2": 10 * MB}, 10 * MB, "TCP"),
        (THERE, {"tcp:": 0, "tcp:10.0.0.2": MB, "rdma": 11 * MB}, 10 * MB, "RDMA"),
        (THERE, {"tcp:": 0, "tcp:10.0.0.9": 10 * MB}, 10 * MB, "unknown"),
        (THERE, {"tcp:": 0}, 10 * MB, "unknown"),
        (THERE, {"rdma": 10 * MB}, 10 * MB, "unknown"),
        (THERE, {"tcp:": 0, "tcp:10.0.0.2": 10 * MB}, 1000, "unknown"),
        (BESIDE, {"tcp:": 0, "tcp:127.0.0.1": 20_000}, 10 * MB, "CMA"),
        (BESIDE, {"tcp:": 0, "tcp:127.0.0.1": 10 * MB}, 10 * MB, "TCP"),
        (BESIDE, {"tcp:": 0, "tcp:10.0.0.1": 10 * MB}, 10 * MB, "TCP"),
        (BESIDE, {"tcp:": 0, "tcp:10.0.0.7": 10 * MB}, 10 * MB, "CMA"),
        (BESIDE, {}, 10 * MB, "unknown"),
    ],
)
def test_the_way_by_its_counters(
    target: WorkerInfo, links: dict[str, int], moved: int, path: str
) -> None:
    assert measured_path(HERE, target, links, moved) == path


def test_the_way_that_should_be() -> None:
    assert expected_path(HERE, THERE) == "RDMA"
    assert expected_path(info("p", transport_paths=("CMA", "TCP")), BESIDE) == "CMA"
    assert expected_path(info("p", transport_paths=("CMA", "TCP")), THERE) == "TCP"
    assert expected_path(info("p", transport_paths=()), THERE) is None
    assert expected_path(info("p", transport="shm"), info("d", transport="shm")) == "shared memory"
    unknown = info("p", machine="")
    assert expected_path(unknown, info("d", machine="")) == "RDMA"


MACHINE = ("CMA", "TCP")
"""The paths of a machine without an adapter."""


def test_each_receiver_is_judged_by_what_its_machine_could_do() -> None:
    source = info("p1", transport_paths=MACHINE, machine_paths=MACHINE)
    free = info("d1", transport_paths=MACHINE, machine_paths=MACHINE)
    bound = info("d2", transport_paths=("TCP",), machine_paths=MACHINE)
    assert (expected_path(source, free), narrowed(source, free)) == ("CMA", ())
    assert (expected_path(source, bound), narrowed(source, bound)) == ("CMA", ("d2",))
    assert narrowed(info("p2", transport_paths=("TCP",), machine_paths=MACHINE), bound) == (
        "p2", "d2",
    )  # fmt: skip
    far = info("d3", "m2", "10.0.0.2", transport_paths=("TCP",), machine_paths=("RDMA", "TCP"))
    assert (expected_path(source, far), narrowed(source, far)) == ("TCP", ())
    near = info("p4", transport_paths=("RDMA",), machine_paths=("RDMA", "TCP"))
    assert narrowed(near, far) == ("d3",)


def test_a_neighbour_that_allows_only_tcp_spoils_no_other_pair() -> None:
    source = info("p1", transport_paths=MACHINE, machine_paths=MACHINE)
    free = info("d1", transport_paths=MACHINE, machine_paths=MACHINE)
    bound = info("d2", transport_paths=("TCP",), machine_paths=MACHINE)
    known = {each.worker_id: each for each in (source, free, bound)}
    watch = PathWatch()
    watch.sample("p1", {"tcp:": 0, "tcp:127.0.0.1": 0}, 1)
    watch.add("p1", "d1", 10 * MB)
    watch.add("p1", "d2", 30 * MB)
    watch.sample("p1", {"tcp:": 0, "tcp:127.0.0.1": 31 * MB}, 2)
    assert watch.path(source, free, known) == "CMA"
    assert watch.path(source, bound, known) == "TCP"


def test_a_watch_looks_at_what_grew_and_at_this_pair_only() -> None:
    watch, known = PathWatch(), {each.worker_id: each for each in (HERE, THERE, BESIDE)}
    watch.sample("p1", {"tcp:": 0, "tcp:10.0.0.2": 99 * MB}, 0)
    assert watch.path(HERE, THERE, known) == "unknown", "one measurement is no growth"
    watch.add("p1", "d1", 10 * MB)
    watch.sample("p1", {"tcp:": 0, "tcp:10.0.0.2": 109 * MB}, 1)
    assert watch.path(HERE, THERE, known) == "TCP"
    assert watch.path(HERE, BESIDE, known) == "unknown", "nothing went there"
    watch.add("p1", "d2", 10 * MB)
    watch.sample("p1", {"tcp:": 0, "tcp:10.0.0.2": 109 * MB, "tcp:127.0.0.1": 5}, 2)
    assert watch.path(HERE, BESIDE, known) == "CMA"
    watch.forget(set())
    assert watch.path(HERE, THERE, known) == "unknown"


@pytest.mark.parametrize(
    ("expected", "rate", "write_bytes", "is_below"),
    [
        ("CUDA IPC", 0.3e9, 8 << 20, True),  # what TCP gave others
        ("CUDA IPC", 200e9, 8 << 20, False),
        ("CUDA IPC", 0.3e9, 1 << 20, False),  # small writes mostly wait
        ("CUDA IPC", None, 8 << 20, False),
        ("RDMA", 0.9e9, 8 << 20, True),
        ("RDMA", 11e9, 8 << 20, False),
        ("TCP", 0.1e9, 8 << 20, False),
        (None, 0.1e9, 8 << 20, False),
    ],
)
def test_a_rate_that_a_way_would_exceed_is_told(
    expected: str | None, rate: float | None, write_bytes: int, is_below: bool
) -> None:
    assert is_below_way(expected, rate, write_bytes) is is_below


@pytest.mark.parametrize(
    ("path", "expected", "is_below", "is_off"),
    [
        ("TCP", "CUDA IPC", False, True),
        ("CUDA IPC", "CUDA IPC", False, False),
        ("CUDA IPC", "CUDA IPC", True, True),
        ("unknown", "RDMA", False, False),
        ("unknown", "RDMA", True, True),
        ("TCP", None, False, False),
    ],
)
def test_a_pair_is_off_its_way_by_name_or_by_rate(
    path: str, expected: str | None, is_below: bool, is_off: bool
) -> None:
    pair = {"path": path, "expected_path": expected, "is_below_way": is_below}
    assert is_off_way(pair) is is_off
