"""A worker is ready once every live router has admitted it; a router that died holds none back.
Where prefill is required, a decode worker is ready only while it reaches a prefill worker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.messages import Role
from tests.faults.faulty_fleet import FaultyFleet, faulty_fleet
from tests.faults.second_router import SecondRouter
from tests.http_client import HTTP
from tests.integration.fleets import complete, wait_for, workers

ANOTHER_SECRET = {"BATON_CLUSTER_SECRET": "another secret than the workers have"}
ALL_BUT_ONE = re.compile(r"not admitted yet by router-\w+")
PROBES = re.compile(r"metrics and probes on (http://\S+)")


@pytest.fixture(scope="module")
def fleet() -> Iterator[FaultyFleet]:
    environment = {
        "BATON_METRICS_PORT": "0", "BATON_REQUIRE_PREFILL": "true", "BATON_PEER_SILENCE_S": "6",
    }  # fmt: skip
    with faulty_fleet(environment=environment, prefill=1, decode=1) as fleet:
        yield fleet


def probes_of(fleet: FaultyFleet, name: str) -> list[str]:
    """The URLs of the metrics servers of all lives of a worker."""
    return PROBES.findall(fleet.fleet.processes[name].log_path.read_text())


def readiness_of_new_life(fleet: FaultyFleet, name: str) -> str:
    """The URL of the readiness probe of a worker that is killed and started again."""
    before = len(probes_of(fleet, name))
    fleet.kill(name)
    fleet.fleet.processes[name].start()
    wait_for("the probes to be served", lambda: len(probes_of(fleet, name)) > before, 60)
    return f"{probes_of(fleet, name)[-1]}/ready"


def readiness(url: str) -> tuple[int, str]:
    answer = HTTP.get(url)
    return answer.status_code, answer.text.strip()


def is_admitted(router: str, name: str) -> bool:
    """Whether a router uses the present life of a worker."""
    listed = HTTP.get(f"{router}/fleet").json()["workers"]
    (shown,) = (each for each in listed if each["worker_id"] == name and each["state"] != "lost")
    return bool(shown["connected"])


def test_a_worker_that_is_ready_is_admitted_by_both_routers(
    fleet: FaultyFleet, tmp_path: Path
) -> None:
    second = SecondRouter(fleet, tmp_path)
    try:
        routers = (fleet.url, second.start())
        names = [*fleet.names(Role.PREFILL), *fleet.names(Role.DECODE)]
        urls = {name: readiness_of_new_life(fleet, name) for name in names}
        for name, url in urls.items():
            wait_for("readiness", lambda url=url: readiness(url) == (200, "ok"))
            assert [is_admitted(each, name) for each in routers] == [True, True]
    finally:
        second.stop()


def test_a_router_that_cannot_admit_it_holds_it_back_until_the_router_is_killed(
    fleet: FaultyFleet, tmp_path: Path
) -> None:
    second = SecondRouter(fleet, tmp_path, ANOTHER_SECRET)
    try:
        second.start()
        (name,) = fleet.names(Role.PREFILL)
        url = readiness_of_new_life(fleet, name)
        wait_for("all but the second", lambda: ALL_BUT_ONE.fullmatch(readiness(url)[1]))
        assert readiness(url)[0] == 503
        assert is_admitted(fleet.url, name)
    finally:
        second.kill()
    wait_for("readiness", lambda: readiness(url) == (200, "ok"))


def test_a_decode_worker_without_prefill_says_so_and_is_not_ready_where_prefill_is_required(
    fleet: FaultyFleet,
) -> None:
    (prefill,), (decode,) = fleet.names(Role.PREFILL), fleet.names(Role.DECODE)
    server = probes_of(fleet, decode)[-1]
    wait_for("readiness", lambda: readiness(f"{server}/ready") == (200, "ok"))
    assert unreachable(server) == 0
    num_told = num_losses_told(fleet, decode)
    fleet.kill(prefill)
    lost = (503, "no prefill worker is registered")
    wait_for("the condition", lambda: readiness(f"{server}/ready") == lost)
    assert num_losses_told(fleet, decode) == num_told + 1
    wait_for("its report", lambda: unreachable(server) == 1)
    wait_for("the router", lambda: workers(fleet.fleet)[decode]["prefill_unreachable"])
    assert complete(fleet.fleet, list(range(300, 360)), max_tokens=4)["choices"], "it serves on"
    fleet.revive()
    wait_for("readiness", lambda: readiness(f"{server}/ready") == (200, "ok"))
    wait_for("its report", lambda: unreachable(server) == 0)
    assert f"prefill workers can be reached again: {prefill}" in log_of(fleet, decode)


def log_of(fleet: FaultyFleet, name: str) -> str:
    return fleet.fleet.processes[name].log_path.read_text()


def num_losses_told(fleet: FaultyFleet, decode: str) -> int:
    return log_of(fleet, decode).count("; prompts are computed here")


def unreachable(server: str) -> int:
    """The gauge of a decode worker."""
    text = HTTP.get(f"{server}/metrics").text
    (value,) = re.findall(r"^baton_worker_prefill_unreachable{.*} (\S+)$", text, re.MULTILINE)
    return int(float(value))
