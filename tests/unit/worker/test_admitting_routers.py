"""When a worker counts as admitted by the routers."""

from __future__ import annotations

import logging

import pytest

from worker.admitting_routers import Admissions


def test_every_live_router_must_have_admitted_it() -> None:
    live = ["router-b", "router-a", "router-c"]
    admissions = Admissions(lambda: live)
    assert admissions.missing() == "not admitted yet by router-a, router-b, router-c"
    admissions.note("router-a")
    admissions.note("router-c")
    assert admissions.missing() == "not admitted yet by router-b"
    admissions.note("router-b")
    assert admissions.missing() is None


def test_without_a_live_router_it_is_ready_at_once() -> None:
    assert Admissions(lambda: ()).missing() is None


def test_a_router_whose_lease_ended_holds_nothing_back() -> None:
    live = ["router-a", "router-b"]
    admissions = Admissions(lambda: live)
    admissions.note("router-a")
    assert admissions.missing() is not None
    live.remove("router-b")
    assert admissions.missing() is None


def test_a_router_that_comes_later_changes_nothing_until_the_worker_is_another_incarnation() -> (
    None
):
    live = ["router-a"]
    admissions = Admissions(lambda: live)
    admissions.note("router-a")
    assert admissions.missing() is None
    live.append("router-b")
    assert admissions.missing() is None
    admissions.start_over()
    assert admissions.missing() == "not admitted yet by router-a, router-b"


def test_what_is_missing_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    admissions = Admissions(lambda: ["router-a", "router-b"])
    for _ in range(3):
        admissions.missing()
    admissions.note("router-a")
    admissions.missing()
    admissions.note("router-b")
    admissions.missing()
    assert [record.getMessage() for record in caplog.records] == [
        "not admitted yet by router-a, router-b",
        "not admitted yet by router-b",
        "ready: admitted by router-a, router-b",
    ]
