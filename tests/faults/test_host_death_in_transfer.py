"""A worker whose ranks lie on two hosts loses the other one while blocks move: it is killed, or
stands still. Requests go on elsewhere with the tokens of one rank, no block stays behind, and what
a stopped host still had to write lands nowhere.

The hosts are network namespaces. Heads and workers of one rank run on the first one. The source is
held before a write, and the fault happens then.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.two_hosts import ADDRESSES, TwoHosts
from tests.faults.armed_points import ArmedPoints
from tests.faults.faulty_worker import FAULTS_DIR, FETCH_SLACK
from tests.integration.distant_hosts import Main, forked_on_host, node_in, two_hosts
from tests.integration.fleets import PAUSE, wait_for
from tests.integration.one_engine import tokens_of_one_engine
from tests.integration.test_exchange_between_hosts import NETWORK, count_of, flags_of, reported
from tests.integration.test_ranks_on_hosts import END_S, ENGINE, complete, left_after, ranks_of
from tests.paths import DEMO_MODEL

CHUNK_TOKENS, PROMPT_TOKENS, NUM_TOKENS = 32, 400, 8
NUM_BLOCKS = 128
TRIES, REPEATS = 40, 4
"""Prompts, and requests with each, of which one is fetched."""
LONG_LEASE = "--lease-s=60"
"""Of decode-2, which is stopped for a while and must not count as lost."""
SECOND = 2
"""The write before which a worker is held; the first one has landed."""
FILLING = [3 + place * 11 % 900 for place in range(1800)]
"""A prompt that takes nearly every block of a pool."""
FILLING_TOKENS, EARLY = 150, 20
BUSY_TOKENS = 1500
PATIENCE_S, STALL_S = 20, 6
"""After how much silence a source or a host is lost, and how long a host stands still then."""


class Loss(NamedTuple):
    """The first decode worker has this layout, and loses its other host by this signal while it
    gets blocks in this way."""

    moving: str
    how: signal.Signals
    layout: tuple[int, int]


LOSSES = [
    Loss(moving, how, layout)
    for moving in ("handoff", "fetch")
    for how in (signal.SIGKILL, signal.SIGSTOP)
    for layout in ((2, 1), (1, 2))
]


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as both:
        yield both


def prompt_of(number: int) -> list[int]:
    return [3 + (13 * number + place) * 7 % 900 for place in range(PROMPT_TOKENS)]


def one_engine(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    return tokens_of_one_engine(
        DEMO_MODEL, prompts, num_tokens, dtype="float32", num_blocks=NUM_BLOCKS
    )


@pytest.mark.nightly
@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_a_worker_that_loses_a_host_while_it_gets_blocks(
    hosts: TwoHosts, tmp_path: Path, case: Loss
) -> None:
    fault = [case.moving, case.how.name, *map(str, case.layout)]
    found = found_by(lose_sink, hosts, tmp_path, fault)
    numbers, answers = zip(*found["answers"], strict=True)
    assert list(answers) == one_engine([prompt_of(number) for number in numbers], NUM_TOKENS)
    assert found["ranks_left"] == []
    assert found["work_left"] == 0


def found_by(main: Main, hosts: TwoHosts, tmp_path: Path, fault: list[str]) -> dict[str, Any]:
    """What a fleet on these hosts finds, whose folder of armed points is `tmp_path`."""
    printed = forked_on_host(hosts, [hosts.namespaces[1], str(tmp_path), *fault], main)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def lose_sink(argv: list[str]) -> int:
    """Print the numbers of prompts with the tokens after each, which of the worker's ranks stay,
    and what is under way at the end, after the worker has started again and got blocks again."""
    other, folder, moving, how, *layout = argv
    flags = {"decode": flags_of("decode", *map(int, layout))}
    is_handoff = moving == "handoff"
    config = config_of(flags, other, num_prefill=int(is_handoff), num_decode=2)
    with faulty_fleet(config, folder) as (fleet, points), ThreadPoolExecutor(2) as threads:
        source = "prefill-1" if is_handoff else "decode-2"
        requests = Requests(fleet, points, source, threads)
        requests.hold()
        ranks = ranks_of(fleet, ["decode-1", "node-decode"])
        fleet.signal("node-decode", signal.Signals[how])
        requests.go_on()
        fleet.wait_end("decode-1", END_S)
        fleet.signal("node-decode", signal.SIGCONT)
        ranks_left = left_after(END_S, ranks)
        for name in ("node-decode", "decode-1"):
            fleet.start(name)
        fleet.wait_ready()
        requests.hold()
        requests.go_on()
        found = {
            "answers": requests.answers,
            "ranks_left": ranks_left,
            "work_left": fleet.left_over(),
        }
    print(json.dumps(found))
    return 0


class Requests:
    """Requests one by one. `answers` are the numbers of prompts, with the tokens after each."""

    def __init__(
        self, fleet: BenchFleet, points: ArmedPoints, source: str, threads: ThreadPoolExecutor
    ) -> None:
        """`source` is to write blocks to decode-1, from a prompt that it computes or has cached."""
        self.answers: list[tuple[int, list[int]]] = []
        self._fleet = fleet
        self._points = points
        self._source = source
        self._threads = threads
        self._model = fleet.workers("router-1")["decode-2"]["model"]
        self._numbers = count()
        self._under_way: Future[tuple[int, list[int]]] | None = None
        self._others: list[Future[list[int]]] = []

    def hold(self) -> None:
        """Send requests until the source is held before its second write to decode-1."""
        if self._source == "decode-2":
            self._hold_fetch()
        else:
            self._hold_handoff()

    def _hold_handoff(self) -> None:
        """The request goes to decode-1 because decode-2 is silent until the source is held."""
        self._fleet.signal("decode-2", signal.SIGSTOP)
        self._wait_until_second_is("silent")
        self._points.arm([self._source], "post", SECOND)
        self._under_way = self._threads.submit(self._complete, next(self._numbers))
        self._points.held("post")
        assert self._writes_to("decode-1")
        self._fleet.signal("decode-2", signal.SIGCONT)
        self._wait_until_second_is("usable")

    def _hold_fetch(self) -> None:
        """Load decides where a prompt goes: the worker that has computed it gets another one
        first."""
        for number in islice(self._numbers, TRIES):
            self.answers.append(self._complete(number))
            for _ in range(REPEATS):
                self._points.arm([self._source], "post", SECOND)
                self._keep_busy()
                self._under_way = self._threads.submit(self._complete, number)
                wait_for("a write, or the answer", self._is_held_or_over)
                if self._points.is_any_held("post"):
                    if self._writes_to("decode-1"):
                        return
                    self._points.release(self._source, "post")
                self._take_answer()
        raise AssertionError(f"{self._source} has never written to decode-1")

    def go_on(self) -> None:
        """Let the held write go on, and wait for the answer."""
        self._points.release(self._source, "post")
        self._take_answer()

    def _take_answer(self) -> None:
        assert self._under_way is not None
        self.answers.append(self._under_way.result(END_S))
        for each in self._others:
            each.result(END_S)
        self._others.clear()

    def _keep_busy(self) -> None:
        """Send a long prompt that no worker knows, and wait until one computes it."""
        number, url = next(self._numbers), self._fleet.url("router-1")
        prompt = [3 + (17 * number + place) * 13 % 900 for place in range(BUSY_TOKENS)]
        self._others.append(self._threads.submit(complete, self._fleet, self._model, prompt, 1))
        names = ("decode-1", "decode-2")
        wait_for("a busy worker", lambda: any(reported(url, n, "num_running") for n in names))

    def _wait_until_second_is(self, state: str) -> None:
        """Wait until decode-2 has this condition."""

        def is_so() -> bool:
            shown = self._fleet.workers("router-1").get("decode-2")
            return shown is not None and shown["condition"]["state"] == state

        wait_for(f"decode-2 to be {state}", is_so)

    def _complete(self, number: int) -> tuple[int, list[int]]:
        return number, complete(self._fleet, self._model, prompt_of(number), NUM_TOKENS)

    def _is_held_or_over(self) -> bool:
        assert self._under_way is not None
        return self._points.is_any_held("post") or self._under_way.done()

    def _writes_to(self, name: str) -> bool:
        """Whether this decode worker, and not the other one, gets the blocks."""
        sinks = {"decode-1", "decode-2"} - {self._source}
        url = self._fleet.url("router-1")

        def busy() -> list[str]:
            return [each for each in sinks if reported(url, each, "blocks_used")]

        return wait_for("a worker to say that it has blocks", busy) == [name]


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["post", "landing"])
@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
def test_a_stopped_host_writes_nothing_when_it_goes_on(
    hosts: TwoHosts, tmp_path: Path, layout: tuple[int, int], point: str
) -> None:
    """At `post` its order to write is too old; at `landing` its connection is gone."""
    found = found_by(stop_source, hosts, tmp_path, [point, *map(str, layout)])
    answers = [found["answer"], *one_engine([FILLING], FILLING_TOKENS)]
    assert answers == [*one_engine([prompt_of(0)], NUM_TOKENS), found["filling"]]
    assert found["was_generating"]
    assert found["ranks_left"] == []
    assert found["work_left"] == 0


def stop_source(argv: list[str]) -> int:
    """Print the tokens after a prompt whose prefill worker's other host stops before a write, and
    after one that has got the blocks of this write when the host goes on."""
    other, folder, point, *layout = argv
    flags = {"prefill": flags_of("prefill", *map(int, layout))}
    config = config_of(flags, other, num_prefill=1, num_decode=1)
    node = "node-prefill"
    with faulty_fleet(config, folder) as (fleet, points), ThreadPoolExecutor(2) as threads:
        model, url = fleet.workers("router-1")["decode-1"]["model"], fleet.url("router-1")
        points.arm([node], point, SECOND)
        asked = threads.submit(complete, fleet, model, prompt_of(0), NUM_TOKENS)
        points.held(point)
        ranks = ranks_of(fleet, ["prefill-1", node])
        fleet.signal(node, signal.SIGSTOP)
        answer = asked.result(END_S)
        fleet.wait_end("prefill-1", END_S)
        count_of(url, "decode-1", "blocks_used", lambda found: found == 0)
        before = reported(url, "decode-1", "decode_tokens")
        filling = threads.submit(complete, fleet, model, FILLING, FILLING_TOKENS)
        count_of(url, "decode-1", "decode_tokens", lambda found: found >= before + EARLY)
        points.arm([node], "posted")
        fleet.signal(node, signal.SIGCONT)
        points.release(node, point)
        points.held("posted")
        was_generating = not filling.done()
        points.release(node, "posted")
        found = {
            "answer": answer,
            "filling": filling.result(END_S),
            "was_generating": was_generating,
            "ranks_left": left_after(END_S, ranks),
            "work_left": fleet.left_over(),
        }
    print(json.dumps(found))
    return 0


@pytest.mark.nightly
def test_a_worker_whose_other_host_stands_still_while_it_loses_a_source(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    """The host closes the source's connections when it goes on; until then nobody else waits."""
    found = found_by(lose_source_in_stall, hosts, tmp_path, [])
    assert "prefill-1 is gone: it is silent and its lease has ended" in found["log"]
    assert found["answers"] == one_engine([prompt_of(0), prompt_of(1)], NUM_TOKENS)
    assert found["ended"] == []
    assert found["work_left"] == 0


def lose_source_in_stall(argv: list[str]) -> int:
    """Print the tokens after a prompt whose source is lost in mid-write while the sink's other host
    stands still, and after one that comes later; and which processes of the sink have ended."""
    other, folder = argv
    flags = {"prefill": flags_of("prefill", 2, 1), "decode": flags_of("decode", 1, 2)}
    flags["decode"] += (f"--peer-silence-s={PATIENCE_S}",)
    config = config_of(flags, other, num_prefill=1, num_decode=1)
    with faulty_fleet(config, folder) as (fleet, points), ThreadPoolExecutor(1) as threads:
        model, url = fleet.workers("router-1")["decode-1"]["model"], fleet.url("router-1")
        sink = [psutil.Process(fleet.pids[name]) for name in ("decode-1", "node-decode")]
        log = fleet._processes.folder / "decode-1.log"
        points.arm(["prefill-1"], "post", SECOND)
        asked = threads.submit(complete, fleet, model, prompt_of(0), NUM_TOKENS)
        points.held("post")
        fleet.signal("prefill-1", signal.SIGSTOP)
        PAUSE.wait(PATIENCE_S - STALL_S / 2)
        fleet.signal("node-decode", signal.SIGSTOP)
        wait_for("the source to be lost", lambda: "prefill-1 is gone" in log.read_text())
        PAUSE.wait(STALL_S)
        fleet.signal("node-decode", signal.SIGCONT)
        answers = [asked.result(END_S), complete(fleet, model, prompt_of(1), NUM_TOKENS)]
        count_of(url, "decode-1", "blocks_stuck", lambda found: found == 0)
        fleet.signal("prefill-1", signal.SIGKILL)
        found = {
            "answers": answers,
            "log": log.read_text(),
            "ended": [each.pid for each in sink if not each.is_running()],
            "work_left": fleet.left_over(),
        }
    print(json.dumps(found))
    return 0


def config_of(flags: dict[str, tuple[str, ...]], other: str, **numbers: int) -> FleetConfig:
    """The first worker of each of these roles has these flags and a second host."""
    here = (
        f"--host={ADDRESSES[0]}",
        f"--chunk-max-tokens={CHUNK_TOKENS}",
        f"--num-blocks={NUM_BLOCKS}",
    )
    return FleetConfig(
        str(DEMO_MODEL),
        worker_flags=(*ENGINE, *NETWORK, *here),
        role_flags={
            "decode-2": (LONG_LEASE,),
            **{f"{role}-1": each for role, each in flags.items()},
        },
        router_flags=("--placement=load", "--local-prefill-threshold-tokens=0"),
        store_host=ADDRESSES[0],
        other_nodes={f"node-{role}": node_in(other, role, each) for role, each in flags.items()},
        worker_module="tests.faults.faulty_worker",
        **numbers,
    )


@contextmanager
def faulty_fleet(config: FleetConfig, folder: str) -> Iterator[tuple[BenchFleet, ArmedPoints]]:
    """A fleet whose workers may be held, and the points that hold them."""
    os.environ |= {FAULTS_DIR: folder, FETCH_SLACK: "-100"}
    with BenchFleet(config) as fleet:
        try:
            yield fleet, ArmedPoints(Path(folder))
        finally:
            for path in Path(folder).iterdir():
                path.unlink()  # or what is held would not end
