"""A rank of a worker is killed or stands still, its head or another: streams go on elsewhere, the
worker ends by itself, and nothing of it stays."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import NamedTuple

import psutil
import pytest

from cli.child import Child
from protocol.messages import Role
from tests.effort import NIGHTLY, some
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet, fetch_held_at
from tests.faults.faulty_worker import FETCH_SLACK
from tests.integration.fleets import SHARED_MEMORY, mapped_by, wait_for
from tests.integration.reference import NUM_TOKENS, Reference

LAYOUTS = [(2, 1), (1, 2), (2, 2)]
"""Ranks of each layer, and stages."""
PATIENT = {"BATON_PEER_SILENCE_S": "3", "BATON_PLACEMENT": "load", FETCH_SLACK: "-100"}
"""A step waits three times as long for a rank."""
MANY_TOKENS = 150
EARLY = 20
"""Steps after which a worker is told to go; its outputs would take far more."""


class Case(NamedTuple):
    """Workers of a role have this layout; in this phase of the work of one of them, one of its
    ranks, the head being 0, is killed or stops."""

    role: Role
    layout: tuple[int, int]
    phase: str
    how: str
    rank: int


class Split(NamedTuple):
    """A fleet, and the role of its workers that have several ranks."""

    faulty: FaultyFleet
    role: Role


class Held(NamedTuple):
    """A stream on a worker that is held at a point, and the tokens it should have."""

    stream: Stream
    worker: str
    point: str
    expected: list[int]


PHASES = {
    Role.DECODE: ("idle", "chunk", "decode", "serve", "drain"),
    Role.PREFILL: ("chunk", "post", "landing"),
}
SPLITS = {(role, layout): (role, layout) for role in PHASES for layout in LAYOUTS}
"""One object for each fleet, by which pytest knows it again."""
EVERY = [
    Case(role, layout, phase, how, rank)
    for role, phases in PHASES.items()
    for layout in LAYOUTS
    for phase in phases
    for how in ("killed", "stopped")
    for rank in range(layout[0] * layout[1])
]
EVERYDAY = [Case(Role.DECODE, (2, 1), "decode", "killed", 1)]


@pytest.fixture(scope="module")
def split(request: pytest.FixtureRequest) -> Iterator[Split]:
    role, (ranks, stages) = request.param
    numbers = {"prefill": 0, "decode": 2} if role is Role.DECODE else {"prefill": 2, "decode": 1}
    layout = {f"{role}_tensor_parallel": ranks, f"{role}_pipeline_parallel": stages}
    with faulty_fleet(PATIENT, transport="nixl", **numbers, **layout) as fleet:
        yield Split(fleet, role)


@pytest.fixture
def fleet(split: Split) -> FaultyFleet:
    return split.faulty


def hands_of(pid: int) -> list[psutil.Process]:
    """A worker's other ranks; it has no other children."""
    return psutil.Process(pid).children()


class Remains:
    """What a worker could leave behind: its processes, and files in shared memory."""

    def __init__(self, pid: int) -> None:
        self.ranks = [psutil.Process(pid), *hands_of(pid)]
        self._files = {path for path in mapped_by(pid) if path.is_relative_to(SHARED_MEMORY)}

    def assert_none(self) -> None:
        wait_for("its processes to end", lambda: not any(each.is_running() for each in self.ranks))
        assert not [path for path in self._files if path.exists()]


def begin(split: Split, case: Case, prompts: list[Reference]) -> Held:
    """A stream that is held in this phase."""
    fleet, reference = split.faulty, prompts[EVERY.index(case) % len(prompts)]
    prompt, output = list(reference.prompt), list(reference.output)
    salt = {"cache_salt": str(case)}
    if case.phase == "serve":
        stream, holder = fetch_held_at(fleet, "serve", prompt, NUM_TOKENS, **salt)
        return Held(stream, holder, "serve", output)
    if case.phase == "drain":
        return begin_drain(split, prompt[:100], salt)
    passes = {"chunk": 3, "decode": 5}.get(case.phase, 2)
    fleet.arm(fleet.names(split.role), case.phase, passes)
    stream = Stream(fleet.url, prompt, NUM_TOKENS, **salt)
    return Held(stream, fleet.held(case.phase), case.phase, output)


def begin_drain(split: Split, prompt: list[int], salt: dict[str, str]) -> Held:
    """A stream whose worker, which was told to go, is about to send its blocks to another."""
    fleet = split.faulty
    expected = Stream(fleet.url, prompt, MANY_TOKENS, cache_salt="undisturbed").wait().tokens
    fleet.arm(fleet.names(split.role), "decode", EARLY)
    stream = Stream(fleet.url, prompt, MANY_TOKENS, **salt)
    drained = fleet.held("decode")
    fleet.arm([drained], "post")
    fleet.signal(drained, signal.SIGTERM)
    fleet.step_until(drained, EARLY + 1, MANY_TOKENS - 2, lambda: fleet.is_any_held("post"))
    return Held(stream, fleet.held("post"), "post", expected)


def has_ended(fleet: FaultyFleet, child: Child) -> bool:
    """Whether a worker has ended, after another prompt that it may have been given."""
    if child.is_running():
        assert Stream(fleet.url, [7] * 40, 2).wait().error is None
    return not child.is_running()


def of_decode_workers(layouts: list[tuple[int, int]]) -> pytest.MarkDecorator:
    """The fleets that a test sees."""
    splits = [SPLITS[Role.DECODE, each] for each in layouts]
    return pytest.mark.parametrize("split", splits, indirect=True, scope="module", ids=str)


@pytest.mark.parametrize(
    ("split", "case"),
    [
        pytest.param(SPLITS[each.role, each.layout], each, id="-".join(map(str, each)))
        for each in (EVERY if NIGHTLY else EVERYDAY)
    ],
    indirect=["split"],
    scope="module",
)
def test_streams_go_on_elsewhere(
    split: Split, fleet: FaultyFleet, long_prompts: list[Reference], case: Case
) -> None:
    held = None if case.phase == "idle" else begin(split, case, long_prompts)
    name = fleet.names(case.role)[0] if held is None else held.worker
    child, remains = fleet.fleet.processes[name], Remains(fleet.pids[name])
    rank = remains.ranks[case.rank]
    if case.how == "killed":
        rank.kill()
        assert child.wait(60)
    else:
        rank.suspend()
        if held is not None and case.rank:
            fleet.release(held.worker, held.point)
    if held is not None:
        held.stream.wait()
        assert (held.stream.error, held.stream.tokens) == (None, held.expected)
    if case.how == "stopped" and not case.rank:
        rank.kill()
    wait_for("the worker to end", lambda: has_ended(fleet, child))
    remains.assert_none()
    if case.how == "killed" and case.rank:
        # forked hands need not begin in the order of their ranks
        how_it_ended = rf"rank [1-9] of {len(remains.ranks)} has ended by signal 9"
        assert re.search(how_it_ended, child.log_tail(20))


def num_loads(child: Child) -> int:
    """How often a worker has come so far that it waits for its ranks to load."""
    return child.log_path.read_text().count("taking memory for KV blocks")


@pytest.mark.nightly
@of_decode_workers(LAYOUTS)
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("which", ["its head", "a hand"])
def test_a_worker_that_loses_a_rank_while_it_loads(
    split: Split, fleet: FaultyFleet, how: str, which: str
) -> None:
    """One that waits for a rank that stands still ends when it is told to."""
    child = fleet.fleet.processes["decode-1"]
    num_hands, num_starts = len(hands_of(child.pid)), num_loads(child)
    fleet.kill(child.name)
    child.start()
    wait_for("its hands to begin", lambda: len(hands_of(child.pid)) == num_hands)
    remains = Remains(child.pid)
    remains.ranks[-1].suspend()
    wait_for("the head to wait for it", lambda: num_loads(child) > num_starts)
    head = remains.ranks[0]
    if which == "a hand":
        if how == "killed":
            remains.ranks[-1].kill()
        else:
            child.signal(signal.SIGTERM)
    else:
        if how == "stopped":
            head.suspend()
        head.kill()
    assert child.wait(60)
    assert (child.exit_status() == 0) == (how == "stopped" and which == "a hand")
    remains.assert_none()


@of_decode_workers(some(LAYOUTS, 1))
def test_a_worker_that_is_told_to_stop_ends_its_hands_in_order(fleet: FaultyFleet) -> None:
    child = fleet.fleet.processes["decode-1"]
    remains = Remains(child.pid)
    assert len(remains.ranks) > 1
    child.signal(signal.SIGTERM)
    assert child.wait(60)
    assert child.exit_status() == 0
    remains.assert_none()
