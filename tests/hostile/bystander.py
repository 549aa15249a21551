"""A well-behaved client beside the attackers, and the router's memory meanwhile.

The bystander is a process of its own, so that nothing the attackers do in Python delays it. It
reads one stream after another and notes the longest gap between two pieces of a stream. It also
asks for `/live` all the time, which no worker answers. For each wait it notes how long the router
and itself had no core meanwhile. A thread of it only sleeps, which shows how long the machine
itself kept the process waiting.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import select
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil

from bench.router.late_steps import Span
from protocol.errors import BatonError
from tests.hostile.core_waits import core_waits, longest_wait_s

_POLL_S = 0.01
_NAP_S = 0.005
_SAMPLE_S = 0.01
_BEGIN_S = 30.0
_LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass(frozen=True)
class Gap:
    """A time between two pieces of the stream, and the part of it without a core."""

    span: Span
    core_wait_s: float


@dataclass(frozen=True)
class Seen:
    """What the bystander saw since the last question: the gaps in its stream. Seconds: the longest
    wait for `GET /live`, how long there was no core meanwhile, the longest wait without the times
    without a core, and the longest oversleeping of the bystander's own thread."""

    gaps: tuple[Gap, ...]
    probe_s: float
    core_wait_s: float
    probe_on_core_s: float
    machine_s: float
    num_pieces: int


class Bystander:
    """Owns the process."""

    def __init__(self, host: str, port: int, model: str, router_pid: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(theirs, host, port, model, router_pid), daemon=True
        )
        self._process.start()
        theirs.close()
        deadline = time.monotonic() + _BEGIN_S
        while not self.look().num_pieces:
            if time.monotonic() > deadline:
                raise BatonError("the bystander's stream does not begin")
            time.sleep(0.1)

    def look(self) -> Seen:
        """What was seen since the last call, with a gap that is not over yet."""
        self._pipe.send("look")
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise BatonError("the bystander's stream was refused or broke off") from None
        assert isinstance(answer, Seen)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()
        self._pipe.close()


class _Watch:
    """Notes the stream's gaps, in the bystander's process."""

    def __init__(self, router_pid: int) -> None:
        self.machine_s = self.probe_s = self.core_wait_s = self.probe_on_core_s = 0.0
        self.gaps: list[Gap] = []
        self.num_pieces = 0
        self._pids = router_pid, os.getpid()
        self.restart()

    def restart(self) -> None:
        """Begin the next gap now."""
        self._last, self._waits = time.monotonic(), self.core_waits()

    def core_waits(self) -> dict[str, int]:
        """The times without a core of the router and of this process so far."""
        return core_waits(*self._pids)

    def nap(self) -> None:
        """Sleep again and again, and note by how much each sleep was too long."""
        while True:
            before = time.perf_counter()
            time.sleep(_NAP_S)
            self.machine_s = max(self.machine_s, time.perf_counter() - before - _NAP_S)

    def piece(self) -> None:
        """Note that a piece of the stream has come."""
        self.gaps.append(self._gap())
        self.restart()
        self.num_pieces += 1

    def _gap(self) -> Gap:
        """The gap until now."""
        span = Span(self._last, time.monotonic())
        return Gap(span, longest_wait_s(self._waits, self.core_waits()))

    def take(self) -> Seen:
        """What was seen since the last call."""
        seen = Seen(
            (*self.gaps, self._gap()),
            self.probe_s,
            self.core_wait_s,
            self.probe_on_core_s,
            self.machine_s,
            self.num_pieces,
        )
        self.probe_s = self.core_wait_s = self.probe_on_core_s = self.machine_s = 0.0
        self.gaps = []
        self.num_pieces = 0
        return seen


class _Probe:
    """One connection on which `GET /live` is asked again and again."""

    def __init__(self, host: str, port: int, watch: _Watch) -> None:
        self._target = (host, port)
        self._watch = watch
        self._core_waits: dict[str, int] = {}
        self._asked_at: float | None = None
        self.socket = self._connect()

    def ask(self) -> None:
        """Ask, unless an answer is still missing. After a long stall the router may count the
        connection as idle and close it; the next question then takes a new one."""
        if self._asked_at is not None:
            return
        self._core_waits = self._watch.core_waits()
        self._asked_at = time.perf_counter()
        try:
            self.socket.sendall(_LIVE)
        except ConnectionError:
            self.socket.close()
            self.socket = self._connect()
            self.socket.sendall(_LIVE)

    def answered(self) -> None:
        """Take the answer, or notice that the connection was closed."""
        try:
            is_open = bool(self.socket.recv(65_536))
        except ConnectionError:
            is_open = False
        self.note()
        self._asked_at = None
        if not is_open:
            self.socket.close()
            self.socket = self._connect()

    def _connect(self) -> socket.socket:
        connected = socket.create_connection(self._target)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected

    def note(self) -> None:
        """Note the wait so far."""
        if self._asked_at is None:
            return
        watch, waited = self._watch, time.perf_counter() - self._asked_at
        if waited <= watch.probe_on_core_s:
            return
        longest = longest_wait_s(self._core_waits, watch.core_waits())
        watch.probe_on_core_s = max(watch.probe_on_core_s, waited - longest)
        if waited > watch.probe_s:
            watch.probe_s, watch.core_wait_s = waited, longest


def _run(
    pipe: multiprocessing.connection.Connection, host: str, port: int, model: str, router_pid: int
) -> None:
    watch = _Watch(router_pid)
    probe = _Probe(host, port, watch)
    threading.Thread(target=watch.nap, daemon=True).start()
    while True:
        with _ask_for_stream(host, port, model) as stream:
            if not _follow(stream, pipe, watch, probe):
                return


def _ask_for_stream(host: str, port: int, model: str) -> socket.socket:
    body = json.dumps(
        {
            "model": model,
            "prompt": "Hi",
            "stream": True,
            "max_tokens": 3000,
            "ignore_eos": True,
            "temperature": 0,
        }
    ).encode()
    stream = socket.create_connection((host, port))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    stream.sendall(head.encode() + body)
    return stream


def _follow(
    stream: socket.socket,
    pipe: multiprocessing.connection.Connection,
    watch: _Watch,
    probe: _Probe,
) -> bool:
    """Read a stream to its end; False if the parent has gone. Raises SystemExit if the stream is
    refused."""
    has_begun = False
    while True:
        if not has_begun:
            watch.restart()  # the wait for the first token is not a gap between tokens
        probe.ask()
        watched: list[Any] = [stream, pipe, probe.socket]
        readable, _, _ = select.select(watched, [], [], _POLL_S)
        for each in readable:
            if each is probe.socket:
                probe.answered()
            elif each is stream:
                data = stream.recv(1 << 16)
                if not has_begun and b" 200 " not in data.partition(b"\r\n")[0]:
                    raise SystemExit(1)
                if not data:
                    return True
                if has_begun:
                    watch.piece()
                has_begun = True
            else:
                try:
                    pipe.recv()
                except EOFError:
                    return False
                probe.note()
                pipe.send(watch.take())


class MemoryWatch:
    """Samples the resident memory of a process in a thread; a context manager."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._peak = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    def take_peak(self) -> int:
        """The most bytes since the last call."""
        peak, self._peak = self._peak, 0
        return max(peak, self._resident())

    def _sample(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            self._peak = max(self._peak, self._resident())

    def _resident(self) -> int:
        family = [self._process, *self._process.children(recursive=True)]
        return sum(each.memory_info().rss for each in family)
