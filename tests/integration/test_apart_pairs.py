"""Workers that cannot hand over to each other: routers do not pair them, operators and receipts say
why, and a restart with other settings is enough."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.tools import worker_apart
from cli.child import Child
from cli.child_settings import Secrets
from cli.fleet import Fleet
from cli.status import main as status
from protocol.messages import Role
from tests.forked import KNOWN_CHECKPOINT, ForkedChildren
from tests.http_client import HTTP
from tests.integration.fleets import (
    PATIENCE,
    PROMPT_REPORTS,
    SETTINGS,
    all_counters,
    complete,
    rank_settings,
    running_fleet,
    trace_of,
    wait_for,
    workers,
)
from tests.weights_sender import SECRET

NUM_TOKENS = 90
"""Of a prompt: too many for a decode worker that has a prefill worker."""


@contextmanager
def one_more(
    fleet: Fleet, role: Role, name: str, folder: Path, variables: dict[str, str], **changes: Any
) -> Iterator[None]:
    """Another worker of the fleet, once the router can use it; leaves in order."""
    chosen = replace(fleet.settings, **changes)
    environ = {**os.environ, **PROMPT_REPORTS, **PATIENCE, KNOWN_CHECKPOINT: chosen.model}
    children = ForkedChildren(chosen, frozenset(SETTINGS) | set(changes), environ | variables)
    child: Child = children.worker(role, name, Secrets(fleet.redis_url, SECRET, ""), folder)
    child.start()
    try:
        wait_for(
            name,
            lambda: (
                not child.is_running()
                or workers(fleet).get(name, {}).get("condition", {}).get("state") == "usable"
            ),
            120,
        )
        yield
    finally:
        child.signal(signal.SIGTERM)
        assert child.wait(60), child.log_tail(40)
    assert child.exit_status() == 0, child.log_tail(40)
    wait_for("the router to see it leave", lambda: name not in workers(fleet))


def apart(fleet: Fleet) -> dict[tuple[str, str], str]:
    """The reasons of `GET /fleet`, by pair."""
    shown = HTTP.get(f"{fleet.url}/fleet").raise_for_status().json()["apart"]
    return {(each["prefill"], each["decode"]): each["reason"] for each in shown}


def ask(fleet: Fleet, number: int) -> dict[str, Any]:
    """The trace of a request with a prompt that nobody holds."""
    prompt = [3 + (number * 101 + 7 * i) % 1700 for i in range(NUM_TOKENS)]
    return trace_of(fleet, f"{complete(fleet, prompt, max_tokens=4)['id']}-0")


def chosen(trace: dict[str, Any]) -> tuple[str | None, str]:
    """The workers of a request, which its first attempt found."""
    (attempt,) = trace["attempts"]
    return attempt["placement"]["prefill"], attempt["placement"]["decode"]


@pytest.mark.nightly
def test_workers_with_another_transport_are_not_paired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First no pair is possible, then half of the pairs, then all."""
    reason = "its transport is nixl, not shm"
    with running_fleet(prefill=0, cluster_secret=SECRET, transport="shm") as fleet:
        with one_more(fleet, Role.PREFILL, "late", tmp_path, {}, transport="nixl"):
            wait_for("the facts", lambda: apart(fleet) == {("late", "decode-1"): reason})
            trace = ask(fleet, 1)
            assert chosen(trace) == (None, "decode-1")
            assert trace["placement"]["rule"] == "no_pair"
            assert trace["placement"]["reason"] == (
                f"local: no prefill worker can hand over to decode-1 (late: {reason})"
            )
            assert [(e["source"], e["worker_id"]) for e in trace["prompt_sources"]] == [
                ("computed", "decode-1")
            ]
            assert status(["--router-url", fleet.url]) == 0
            assert f"late cannot hand over to decode-1: {reason}" in capsys.readouterr().out
            with one_more(fleet, Role.PREFILL, "able", tmp_path, {}, transport="shm"):
                assert apart(fleet) == {("late", "decode-1"): reason}
                for number in (2, 3, 4):
                    trace = ask(fleet, number)
                    assert chosen(trace) == ("able", "decode-1")
                    assert trace["placement"]["left_out"].endswith(f"late to decode-1: {reason}")
            assert all_counters(fleet)["late"]["prefill_tokens"] == 0, "it computed nothing in vain"
        with one_more(fleet, Role.PREFILL, "late", tmp_path, {}, transport="shm"):
            trace = ask(fleet, 5)
            assert chosen(trace) == ("late", "decode-1")
            assert trace["placement"]["left_out"] == ""


def test_a_refusal_comes_back_before_any_request_and_ends_with_its_process(tmp_path: Path) -> None:
    """No registration tells that a worker compares digests of whole blocks, which no rank has."""
    with running_fleet(
        module=worker_apart.__name__,
        transport="nixl",
        cluster_secret=SECRET,
        **rank_settings((2, 1), (1, 1)),
    ) as fleet:
        digests = {"BATON_KV_CHECKSUM": "true"}
        with one_more(fleet, Role.DECODE, "wary", tmp_path, digests, transport="nixl"):
            wait_for("the refusal", lambda: ("prefill-1", "wary") in apart(fleet))
            assert "digests" in apart(fleet)["prefill-1", "wary"]
            used = {chosen(ask(fleet, number)) for number in range(6)}
            assert used <= {("prefill-1", "decode-1"), (None, "wary")}
        with one_more(fleet, Role.DECODE, "wary", tmp_path, {}, transport="nixl"):
            assert apart(fleet) == {}
            assert {chosen(ask(fleet, number))[0] for number in range(6, 10)} == {"prefill-1"}
