"""Who may take an id that another process holds: a claim that learns what the store says."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from hashlib import sha1

import pytest

from process.store.id_claim import IdClaim, holder_name
from protocol import wire
from protocol.messages import Role
from protocol.registration import WorkerInfo
from tests.registration import registration

LEASE_S = 2.0
GRACE_S = 1.0


def holder(incarnation: str = "theirs", **changes: object) -> WorkerInfo:
    return registration("a", incarnation, **({"machine": "there"} | changes))


def claim(**options: bool) -> IdClaim:
    return IdClaim(registration("a", "ours", machine="here"), GRACE_S, **options)


def look(claim: IdClaim, info: WorkerInfo, now: float, ends_at: float, took_s: float = 0.0) -> bool:
    """The store says that the lease ends at a time; it looked just before it answered."""
    answered_at = now + took_s
    value = wire.encode_worker_info(info)
    return claim.note_holder(value, ends_at - answered_at, now, answered_at)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until it is killed."""
    with subprocess.Popen(["sleep", "600"]) as running:
        yield running
        running.kill()


def test_a_holder_that_still_renews_after_the_grace_period_is_alive() -> None:
    ours, theirs = claim(), holder(role=Role.PREFILL, host="gpu-7", pid=22)
    assert look(ours, theirs, 0.0, ends_at=LEASE_S)
    assert not look(ours, theirs, 0.5, ends_at=2.5)
    assert not look(ours, theirs, 1.0, ends_at=2.5)
    assert not look(ours, theirs, 1.3, ends_at=2.5), "the renewal was before the grace period ended"
    assert ours.refusal is None
    look(ours, theirs, 1.4, ends_at=3.4)
    assert ours.refusal == (
        "worker_id a is held by the prefill worker at tcp://127.0.0.1:1 (pid 22 on gpu-7), which "
        "is alive; stop that worker, or give this one another worker_id"
    )
    assert ours.replaces == ""


def test_a_holder_that_renews_no_more_is_waited_for() -> None:
    ours, theirs = claim(), holder()
    for step in range(20):
        look(ours, theirs, step / 10, ends_at=LEASE_S)
    assert (ours.refusal, ours.replaces) == (None, "")
    assert not ours.may_succeed_now


def test_a_slow_store_does_not_look_like_a_renewal() -> None:
    ours, theirs = claim(), holder()
    look(ours, theirs, 0.0, ends_at=LEASE_S)
    look(ours, theirs, 1.0, ends_at=LEASE_S, took_s=0.4)
    look(ours, theirs, 1.5, ends_at=LEASE_S)
    look(ours, theirs, 1.6, ends_at=LEASE_S, took_s=0.3)
    assert ours.refusal is None


def test_a_registration_without_an_end_is_refused() -> None:
    ours, value = claim(), wire.encode_worker_info(holder())
    for now in (0.0, 1.0, 1.1):
        ours.note_holder(value, -0.001, now, now)
    assert ours.refusal is not None


def test_a_process_of_our_machine_that_has_ended_is_replaced(
    process: subprocess.Popen[bytes],
) -> None:
    ours, theirs = claim(), holder(machine="here", pid=process.pid)
    assert ours.may_succeed_now, "nobody is known to hold the id"
    look(ours, theirs, 0.0, ends_at=LEASE_S)
    assert not ours.may_succeed_now
    process.kill()
    process.wait()
    look(ours, theirs, 0.1, ends_at=LEASE_S)
    assert (ours.may_succeed_now, ours.replaces) == (True, "theirs")


def test_a_process_of_our_machine_that_lives_is_refused_when_it_renews(
    process: subprocess.Popen[bytes],
) -> None:
    ours, theirs = claim(), holder(machine="here", pid=process.pid)
    for now in (0.0, 1.0, 1.1):
        look(ours, theirs, now, ends_at=now + LEASE_S)
    assert ours.replaces == ""
    assert ours.refusal is not None


@pytest.mark.parametrize("machine", ["there", ""])
def test_a_pid_of_another_machine_says_nothing(
    process: subprocess.Popen[bytes], machine: str
) -> None:
    process.kill()
    process.wait()
    ours = IdClaim(registration("a", "ours", machine="here" if machine else ""), GRACE_S)
    look(ours, holder(machine=machine, pid=process.pid), 0.0, ends_at=LEASE_S)
    assert ours.replaces == ""


def test_a_holder_with_our_own_pid_was_an_earlier_process() -> None:
    ours = claim()
    look(ours, holder(machine="here", pid=os.getpid()), 0.0, ends_at=LEASE_S)
    assert ours.replaces == "theirs"


def test_another_newcomer_that_was_faster_is_a_holder_like_any_other() -> None:
    ours = claim()
    look(ours, holder(machine="here", pid=os.getpid()), 0.0, ends_at=LEASE_S)
    assert look(ours, holder("faster"), 2.0, ends_at=4.0)
    assert ours.replaces == ""
    look(ours, holder("faster"), 2.9, ends_at=4.9)
    look(ours, holder("faster"), 3.0, ends_at=4.9)
    assert ours.refusal is None, "its grace period began when it was seen"
    look(ours, holder("faster"), 3.1, ends_at=5.1)
    assert ours.refusal is not None


def test_what_the_store_forgot_is_taken_back() -> None:
    ours = claim(is_to_restore=True)
    look(ours, holder(), 0.0, ends_at=LEASE_S)
    assert ours.replaces == "theirs"


def test_a_holder_that_cannot_be_read_is_waited_for_or_refused() -> None:
    ours, value = claim(is_to_restore=True), b'{"worker_id": "a", "incarnation": "later"}'
    ours.note_holder(value, LEASE_S, 0.0, 0.0)
    assert (ours.replaces, ours.refusal) == ("", None)
    for now in (1.0, 1.1):
        ours.note_holder(value, LEASE_S, now, now)
    assert ours.refusal is not None
    assert holder_name(value) in ours.refusal


@pytest.mark.parametrize(
    ("value", "left_s"),
    [
        (b"\xff{", LEASE_S),
        (b"[1]", LEASE_S),
        (b'{"incarnation": "x"}', LEASE_S),
        (b'{"worker_id": "other", "incarnation": "x"}', LEASE_S),
        (b'{"worker_id": "a", "incarnation": "x"}', -1e-3),
        (b"[" * 10_000, LEASE_S),
    ],
)
def test_what_is_no_registration_holds_no_id(value: bytes, left_s: float) -> None:
    ours = claim()
    ours.note_holder(value, left_s, 0.0, 0.0)
    assert ours.replaces == sha1(value).hexdigest()
    assert ours.refusal is None
