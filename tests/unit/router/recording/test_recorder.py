"""What a router records of its requests, what it does not, and that the simulator reads it."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
from collections import Counter
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import msgspec
import pytest

from protocol.errors import ConfigError, ServiceError
from router.recording import recorder as recorder_module
from router.recording import trace_file
from router.recording.known_blocks import KnownBlocks
from router.recording.recorder import Recorder
from router.recording.trace_file import TraceFile
from router.requests.interface import GenerationRequest
from router.requests.machine.retries import Retries
from router.requests.served_generation import ServedGeneration
from router.requests.trace import AttemptTrace, RequestTrace
from router.routing.placement import Candidate, Mode, Placement
from router.routing.reasons import Rule
from simulator.traces.files import TraceOptions, read_trace
from simulator.traces.sessions import BlockRuns
from tests.unit.router.router_harness import Consumer, finish_on, request

SECRET = "a secret of a cluster"
BLOCK = 16
ROOM = 1 << 20


class Sink:
    """Nobody reads."""

    is_full = False

    async def wait_room(self) -> None:
        raise AssertionError

    def take(self, delta: object) -> bool:
        return True


def hashes(*ids: int) -> list[bytes]:
    """Those of blocks of 16 tokens: each id stands for a block and its predecessors."""
    return [each.to_bytes(16, "little") for each in ids]


def ended(
    at_us: int,
    blocks: list[bytes],
    output: int = 5,
    took_us: int = 1_000_000,
    **changes: Any,
) -> ServedGeneration:
    """A request that has finished on a worker."""
    whole = GenerationRequest(**{**msgspec.structs.asdict(request(len(blocks) * BLOCK)), **changes})
    whole.hashes._hashes = blocks
    trace = RequestTrace("r", at_us, len(whole.token_ids), last_token_us=at_us + took_us)
    local = Placement(
        Mode.LOCAL, Candidate("d1", 0.0, 0, 0), None, "", (), (), (), rule=Rule.NO_PREFILL
    )
    trace.attempts = [AttemptTrace(1, local, at_us, block_size=BLOCK)]
    retries = Retries(1, 0.0, 0.0, random.Random(0))
    generation = ServedGeneration(whole, 0.0, retries, Sink(), trace)
    generation.end("finished")
    generation.stream.token_ids = [7] * output
    return generation


def record(path: Path, *generations: ServedGeneration, max_bytes: int = ROOM) -> Counter[str]:
    """Record requests; returns what became of them."""
    results: Counter[str] = Counter()

    def count(result: str, number: int) -> None:
        results[result] += number

    recorder = Recorder(TraceFile(path, max_bytes), SECRET, count)
    for each in generations:
        recorder.take(each)
    recorder.close()
    return results


def read(path: Path) -> Any:
    return read_trace(str(path), TraceOptions())


async def test_a_request_leaves_a_line_when_it_ends(harness, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorder = Recorder(TraceFile(path, ROOM), SECRET, harness.metrics.recorded.add)
    harness.dispatcher.on_end = recorder.take
    (worker,) = await harness.join("d1")
    for name in ("one", "test-two"):
        consumer = Consumer(harness.dispatcher, request(100, request_id=name))
        await finish_on(worker, consumer)
    recorder.close()
    assert harness.metric("recorded_requests_total", outcome="written") == 1
    (session,) = read(path).sessions
    (turn,) = session.turns
    assert (turn.num_prompt, turn.num_output) == (100, 6)
    assert turn.blocks == BlockRuns(0, 64, ((0, 1),))


async def test_a_request_that_no_worker_got_leaves_no_line(harness, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorder = Recorder(TraceFile(path, ROOM), SECRET, harness.metrics.recorded.add)
    harness.dispatcher.on_end = recorder.take
    refused = Consumer(harness.dispatcher, request(100))
    with pytest.raises(ServiceError, match="no decode worker is registered"):
        await refused.task
    (worker,) = await harness.join("d1")
    await finish_on(worker, Consumer(harness.dispatcher, request(100)))
    recorder.close()
    assert harness.metric("recorded_requests_total", outcome="written") == 1
    assert read(path).num_turns == 1


def test_times_are_those_of_the_system_clock_even_if_it_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "clock_step_us", lambda: -7_200_000_000)
    path = tmp_path / "trace"
    record(path, ended(7_201_000_000, hashes(1, 2)))
    (line,) = [json.loads(each) for each in path.read_text().splitlines()[1:]]
    assert (line["at_us"], line["took_us"]) == (1_000_000, 1_000_000)


def test_the_simulator_reads_blocks_and_sessions(tmp_path: Path) -> None:
    path, talk = tmp_path / "trace", "somebody's talk"
    first = hashes(*range(1, 9))
    results = record(
        path,
        ended(1_000_000, first, session=talk),
        ended(2_500_000, first[:4] + hashes(*range(20, 24)), share="Ada's", priority=-2),
        ended(4_000_000, first + hashes(*range(9, 17)), session=talk),
        ended(4_100_000, hashes(*range(30, 34)), session=talk),
    )
    assert results == {"written": 4}
    talking, other, beside = read(path).sessions
    assert [turn.pause_s for turn in talking.turns] == [0.0, 2.0]
    assert [turn.num_prompt for turn in talking.turns] == [128, 256]
    numbers = ((0, 2), (3, 2))
    assert talking.turns[0].blocks == BlockRuns(0, 64, numbers), "with its output's blocks"
    assert talking.turns[1].blocks == BlockRuns(0, 64, numbers)
    assert (other.start_s, other.turns[0].blocks) == (1.5, BlockRuns(0, 64, ((0, 1), (2, 1))))
    assert (talking.share, talking.priority) == ("", 0)
    assert (other.share != "", other.priority) == (True, -2)
    assert (beside.start_s, len(beside.turns)) == (3.1, 1), "it did not wait for the turn before"


def test_no_text_token_or_name_is_written_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.touch(mode=0o644)
    record(path, ended(1, hashes(1, 2, 3, 4), session="my session", share="key of Ada"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    head, line = map(json.loads, path.read_text().splitlines())
    assert head == {"baton_trace": 1, "block_tokens": 64}
    assert line.keys() == {"at_us", "took_us", "in", "out", "end", "session", "share", "blocks"}
    digests = [line["session"], line["share"], *line["blocks"]]
    assert all(len(each) == 16 and set(each) <= set("0123456789abcdef") for each in digests)
    assert hashes(4)[0].hex()[:16] not in digests, "digests of hashes are keyed"


def test_a_prompt_s_known_blocks_are_written_once() -> None:
    blocks, prompt = KnownBlocks(b"key"), hashes(*range(40))
    after, new = blocks.note(prompt[:20], BLOCK)
    assert (after, len(new)) == ("", 5)
    assert blocks.note(prompt, BLOCK)[0] == new[-1]
    assert len(blocks.note(prompt[:7] + hashes(99), BLOCK)[1]) == 1
    assert KnownBlocks(b"other").note(prompt[:20], BLOCK)[1] != new
    assert len(KnownBlocks(b"key").note(hashes(1, 2, 3), 128)[1]) == 3, "never less than a block"


def test_known_blocks_are_bounded() -> None:
    blocks = KnownBlocks(b"key", most=4)
    for number in range(3):
        _, new = blocks.note(hashes(*range(8 * number, 8 * number + 8)), BLOCK)
        assert len(new) == 2
    assert blocks.note(hashes(*range(8)), BLOCK)[0] == "", "the first blocks are forgotten"


def test_the_recording_has_a_limit_and_each_file_stands_alone(tmp_path: Path) -> None:
    path, limit = tmp_path / "trace", 1 << 14
    prompt = hashes(*range(400))
    results = record(path, *(ended(n, prompt) for n in range(200)), max_bytes=limit)
    assert results == {"written": 200}
    former = tmp_path / "trace.1"
    assert sorted(tmp_path.iterdir()) == [path, former]
    assert path.stat().st_size + former.stat().st_size <= limit
    for each in (path, former):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
        turns = [session.turns[0] for session in read(each).sessions]
        assert {turn.blocks for turn in turns} == {BlockRuns(0, 64, ((0, 100),))}


def test_a_second_process_goes_on_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, ended(1, hashes(1, 2, 3, 4)))
    record(path, ended(2, hashes(1, 2, 3, 4)))
    assert len({session.turns[0].blocks for session in read(path).sessions}) == 1


def test_two_processes_do_not_write_to_one_file(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace", ROOM)
    with pytest.raises(ConfigError, match="another process records there"):
        TraceFile(tmp_path / "trace", ROOM)
    file.close()


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "nowhere", "home"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "home":
        path = Path("~nobody-of-this-name/trace")
    else:
        path = tmp_path / "no" / "trace"
    with pytest.raises(ConfigError, match="record_trace"):
        TraceFile(path, ROOM)


def test_a_new_file_that_could_not_be_opened_is_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    path = tmp_path / "trace"
    file = TraceFile(path, ROOM)
    file.write(b"former")
    with monkeypatch.context() as patch:
        patch.setattr(trace_file.os, "open", fail)
        with pytest.raises(OSError, match="Too many"):
            file.rotate()
    file.rotate()
    file.write(b"new")
    file.close()
    assert (path.read_bytes(), (tmp_path / "trace.1").read_bytes()) == (b"new", b"former")


def test_an_empty_file_that_took_the_path_of_a_moved_one_is_written(tmp_path: Path) -> None:
    """As logrotate leaves it (`create`). The file of the former half stays as it was."""
    path, half = tmp_path / "trace", tmp_path / "trace.1"
    half.write_bytes(b"half")
    file = TraceFile(path, ROOM)
    file.write(b"former")
    path.rename(tmp_path / "taken")
    path.touch()
    assert not file.has_room(1)
    file.rotate()
    assert file.has_room(1)
    file.write(b"new")
    file.close()
    assert (path.read_bytes(), half.read_bytes()) == (b"new", b"half")


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_file_that_was_moved_or_removed_is_followed_by_a_new_one(
    tmp_path: Path, is_kept: bool
) -> None:
    """An operator takes the recording away while the router goes on. Each file stands alone."""
    path, taken, results = tmp_path / "trace", tmp_path / "taken", SimpleQueue[str]()
    recorder = Recorder(TraceFile(path, ROOM), SECRET, lambda result, count: results.put(result))
    recorder.take(ended(1, hashes(1, 2, 3, 4)))
    assert results.get(timeout=10) == "written"
    path.rename(taken)
    if not is_kept:
        taken.unlink()
    recorder.take(ended(2, hashes(1, 2, 3, 4)))
    assert results.get(timeout=10) == "written"
    recorder.close()
    for each in (path, taken)[: 1 + is_kept]:
        (session,) = read(each).sessions
        assert session.turns[0].blocks is not None


class FullDisk:
    """A file that takes only some writes."""

    def __init__(self, *fails: bool) -> None:
        self.fails = list(fails)
        self.data = b""

    def has_room(self, num_bytes: int) -> bool:
        return True

    def rotate(self) -> None:
        raise AssertionError

    def write(self, data: bytes) -> None:
        if self.fails.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        self.data += data

    def close(self) -> None: ...


def test_after_lost_lines_the_next_one_is_understood(tmp_path: Path) -> None:
    disk, results = FullDisk(False, True, False), SimpleQueue[str]()
    recorder = Recorder(disk, SECRET, lambda result, count: results.put(result))
    prompt = hashes(*range(1, 13))
    for number, result in enumerate(("written", "lost", "written"), start=1):
        recorder.take(ended(number, prompt[: 4 * number]))
        assert results.get(timeout=10) == result
    recorder.close()
    (tmp_path / "trace").write_bytes(disk.data)
    blocks = [session.turns[0].blocks for session in read(tmp_path / "trace").sessions]
    assert blocks == [BlockRuns(0, 64, ((0, 1),)), BlockRuns(0, 64, ((0, 3),))]


def test_only_lines_that_were_not_written_are_lost() -> None:
    class Slow(FullDisk):
        def write(self, data: bytes) -> None:
            begun.set()
            assert may_write.wait(10)
            super().write(data)

    begun, may_write, results = Event(), Event(), Counter[str]()
    disk = Slow(False, False, True, False)
    recorder = Recorder(disk, SECRET, lambda result, count: results.update({result: count}))
    recorder.take(ended(1, []))
    assert begun.wait(10)
    for number in (2, 3, 4):  # they are written together
        recorder.take(ended(number, []))
    may_write.set()
    recorder.close()
    assert results == {"written": 3, "lost": 1}


def test_requests_are_lost_while_too_many_wait(tmp_path: Path) -> None:
    results = Counter[str]()
    recorder = Recorder(FullDisk(), SECRET, lambda result, count: results.update({result: count}))
    recorder.close()  # nobody takes from the queue any more
    for number in range(4100):
        recorder.take(ended(number, []))
    assert results == {"lost": 4}
