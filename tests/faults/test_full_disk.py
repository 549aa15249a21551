"""Logs on a full disk: every process serves on, and the console says whose lines are lost.

A limit on the size of files stands for the disk: like a full one, it refuses all further lines.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest

from cli.status import main as print_status
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.http_client import HTTP
from tests.integration.fleets import wait_for
from tests.integration.reference import NUM_TOKENS, Reference

LOSING = {"router", "decode-1"}


@pytest.fixture(scope="module")
def fleet() -> Iterator[FaultyFleet]:
    with faulty_fleet(prefill=1, decode=1) as fleet:
        yield fleet


def limit_files(fleet: FaultyFleet, most_bytes: int) -> None:
    for name in LOSING:
        pid = fleet.fleet.processes[name].pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))


def told(fleet: FaultyFleet, path: str) -> Any:
    return HTTP.get(f"{fleet.url}/{path}").raise_for_status().json()


def answer(fleet: FaultyFleet, reference: Reference) -> list[int]:
    return Stream(fleet.url, list(reference.prompt), NUM_TOKENS).wait().tokens


def losing(fleet: FaultyFleet) -> set[str]:
    return {each["process"] for each in told(fleet, "fleet")["logs"]}


def test_processes_serve_on_and_the_console_says_whose_log_is_lost(
    fleet: FaultyFleet, long_prompts: list[Reference], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = long_prompts[:2]
    assert answer(fleet, first) == list(first.output)
    limit_files(fleet, 0)
    fleet.kill("prefill-1")  # of which router and decode worker write
    wait_for("the lost lines to be told", lambda: losing(fleet) == LOSING)
    assert answer(fleet, second) == list(second.output)
    found = wait_for(
        "the doctor",
        lambda: [e for e in told(fleet, "doctor")["findings"] if e["rule"] == "logs"],
    )
    assert found[0]["title"] == "The logs of decode-1, router cannot be written"
    assert print_status([f"--router-url={fleet.url}"]) == 0
    assert "router cannot write its log" in capsys.readouterr().out
    limit_files(fleet, resource.RLIM_INFINITY)
    fleet.revive()  # of which the router writes
    wait_for("the router's log to go on", lambda: "router" not in losing(fleet))
