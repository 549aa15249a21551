"""A worker that a test can hold at an exact point: `python -m tests.faults.faulty_worker ROLE ...`.

Runs the real worker with its classes wrapped. The folder `FAULTS_DIR` arms points: a file
`WORKER_ID.POINT` with a number holds the loop when it passes the point for that time, until the
file is removed; `WORKER_ID.POINT.reached` says that it stands there. Only the thread that passes
is held (at `post`, `landing` and `posted` that of the transfers, else the loop's), so that messages
already sent leave; the lease lives on. A loop that is held notes in `WORKER_ID.heard` the kinds of
messages that have come meanwhile, and reads them when it goes on. At `post` a write may still be
refused, at `landing` not.
A file `ROLE.SPOIL` with a number spoils that write of whichever worker of the role comes to it
first: it fails, hangs, or moves wrong bytes. `ROLE.evict` makes a worker evict around that lookup
for a fetch, `ROLE.deaf` makes its UCX worker deaf at that poll. Prompts that begin with POISON make
a step raise, those that begin with DEADLY end the process, with DEADLY_LATER in a decode step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partialmethod, wraps
from pathlib import Path
from typing import Any

import zmq

from cli.commands import COMMANDS
from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.step_result import StepResult
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from kv_transfer.service import TransferService
from kv_transfer.transfer_loop import TransferLoop, WriteCommand
from kv_transfer.transports.interface import Notification, WriteDone
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.shm import ShmTransport
from process.sockets.control import ControlServer, Peer
from protocol import wire
from protocol.control_message import ControlMessage
from protocol.errors import TransferError
from protocol.handoff_messages import KvFetch
from scheduling import fetch_rule
from scheduling.batch import Batch
from tests.deafness import deafen
from worker.outbound import OutboundHandoffs
from worker.served_fetches import ServedFetches

POISON = [13, 14, 13, 14, 15]
DEADLY = [15, 14, 13, 14, 13]
DEADLY_LATER = [14, 13, 15, 13, 14]
FAULTS_DIR = "FAULTS_DIR"
WRITE_TIMEOUT = "FAULTS_WRITE_TIMEOUT_S"
"""Replaces the product's own, so that a write that hangs need not be waited for so long."""
FETCH_SLACK = "FAULTS_FETCH_SLACK_S"
"""Replaces what fetching and loading must be quicker by than computing: below 0, a busy machine
fetches, too."""
KEPT_BLOCKS = 8
MAX_WRITE_BLOCKS = 4
"""Those of a chunk of 64 tokens: a long prompt takes many writes, also where all of it was computed
before its grant came."""
POLL_S = 0.005
"""Between two looks of a worker that is held, which would else keep a core busy."""
_OF_THE_LOOP = ("chunk", "decode")


class FaultPoints:
    """The armed points of one worker."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        self._folder = folder
        self._worker_id = worker_id
        self._passes: dict[str, int] = {}
        self._heard = folder / f"{worker_id}.heard"
        self._server: ControlServer | None = None
        self._unread: list[list[bytes]] = []

    def reach(self, point: str) -> None:
        """Pass a point, or wait there until the test releases it."""
        armed = self._folder / f"{self._worker_id}.{point}"
        wanted = self._wanted(armed, point)
        if not self._is_due(point, wanted):
            return
        reached = self._folder / f"{self._worker_id}.{point}.reached"
        reached.write_text(str(wanted))
        while self._wanted(armed, point) == wanted:
            if point in _OF_THE_LOOP:
                self._listen()
            time.sleep(POLL_S)
        self._heard.unlink(missing_ok=True)
        reached.unlink(missing_ok=True)

    def unread(self, server: ControlServer) -> list[list[bytes]]:
        """The frames that came to the loop's socket while the loop was held."""
        self._server = server
        frames, self._unread = self._unread, []
        return frames

    def _listen(self) -> None:
        """Take the messages that have come to the socket, and note their kinds."""
        if self._server is None:
            return
        with contextlib.suppress(zmq.Again):
            self._unread.append(self._server.socket.recv_multipart(zmq.NOBLOCK))
            _, *parts = self._unread[-1]
            with self._heard.open("a") as heard:
                heard.write(f"{type(wire.decode_control(wire.joined(parts))).__name__}\n")

    def is_any_armed(self, *points: str) -> bool:
        """Whether a pass of one of the points may be held."""
        return any((self._folder / f"{self._worker_id}.{point}").exists() for point in points)

    def strikes(self, spoil: str) -> bool:
        """Whether this write is the one to spoil. Only one worker of the role spoils a write."""
        armed = self._folder / f"{self._worker_id.partition('-')[0]}.{spoil}"
        if not self._is_due(spoil, self._wanted(armed, spoil)):
            return False
        try:
            armed.rename(self._folder / f"{self._worker_id}.{spoil}.reached")
        except FileNotFoundError:
            return False  # another worker came first
        return True

    def _wanted(self, armed: Path, point: str) -> int | None:
        """The pass that is armed; passes are counted from when one was."""
        try:
            return int(armed.read_text())
        except FileNotFoundError:
            self._passes.pop(point, None)
            return None

    def _is_due(self, point: str, wanted: int | None) -> bool:
        if wanted is None:
            return False
        self._passes[point] = self._passes.get(point, 0) + 1
        return self._passes[point] == wanted


def install(points: FaultPoints) -> None:
    """Wrap the methods at which the points lie."""
    _before(HandoffSource, "grant", lambda *_: points.reach("grant"))
    _before(TransferService, "write", lambda *_: points.reach("write"))
    _before(HandoffSink, "offer", lambda *_: points.reach("offer"))
    _before(HandoffSource, "found", lambda *_: points.reach("serve"))
    _evict_around_lookups(points)
    _before(OutboundHandoffs, "_close", lambda *_: points.reach("close"))
    _before(ModelRunner, "launch", _spoil)
    _before(ModelRunner, "launch_ahead", lambda batch, _: _spoil(batch))
    _reach_around_posts(points)
    _read_what_came_meanwhile(points)
    for transport in (NixlTransport, ShmTransport):
        spoil_writes(transport, points)
    if WRITE_TIMEOUT in os.environ:
        _, *others = TransferService.__init__.__defaults__ or ()
        TransferService.__init__.__defaults__ = (float(os.environ[WRITE_TIMEOUT]), *others)
    fetch_rule.SLACK_S = float(os.environ.get(FETCH_SLACK, fetch_rule.SLACK_S))
    limits = {"max_write_blocks": MAX_WRITE_BLOCKS, "max_fetch_blocks": MAX_WRITE_BLOCKS}
    HandoffSource.__init__ = partialmethod(HandoffSource.__init__, **limits)  # type: ignore[method-assign]
    run = Engine.run

    @wraps(run)
    def run_and_reach(engine: Engine, batch: Batch) -> StepResult:
        result = run(engine, batch)
        if batch.chunks:
            points.reach("chunk")
        if batch.decodes:
            points.reach("decode")
        return result

    Engine.run = run_and_reach  # type: ignore[method-assign]


def _evict_around_lookups(points: FaultPoints) -> None:
    """A holder that has promised blocks evicts all but the newest ones before it looks them up, and
    all that is not pinned before it writes."""
    pin = ServedFetches.pin

    @wraps(pin)
    def evict_and_pin(served: ServedFetches, fetch: KvFetch) -> Any:
        blocks = served._scheduler.blocks
        strikes = points.strikes("evict")
        if strikes:
            blocks.release(blocks.allocate(max(0, blocks.num_free - KEPT_BLOCKS)))
        found = pin(served, fetch)
        if strikes:
            blocks.release(blocks.allocate(blocks.num_free))
        return found

    ServedFetches.pin = evict_and_pin  # type: ignore[method-assign]


def _before(owner: type, name: str, action: Callable[..., None]) -> None:
    method = getattr(owner, name)

    @wraps(method)
    def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
        action(*arguments)
        return method(self, *arguments, **named)

    setattr(owner, name, wrapped)


def _reach_around_posts(points: FaultPoints) -> None:
    """While one of their points is armed, writes go one by one: one that is posted while another
    waits to be polled may be notified first, and who is held then never notifies the other."""
    write = TransferLoop.write

    @wraps(write)
    def write_and_reach(self: TransferLoop, command: WriteCommand) -> None:
        while points.is_any_armed("post", "landing", "posted") and self.has_writes_under_way:
            self.poll()
        points.reach("post")
        write(self, command)
        points.reach("posted")

    TransferLoop.write = write_and_reach  # type: ignore[method-assign]


def _read_what_came_meanwhile(points: FaultPoints) -> None:
    receive = ControlServer.receive

    @wraps(receive)
    def receive_all(self: ControlServer) -> list[tuple[Peer, ControlMessage]]:
        taken = [self._take(frames) for frames in points.unread(self)]
        return [each for each in taken if each is not None] + receive(self)

    ControlServer.receive = receive_all  # type: ignore[method-assign]


def spoil_writes(transport: type, points: FaultPoints) -> None:
    """A write that hangs comes out of `poll` when its peer was removed, as any does."""
    owner: Any = transport
    post_write, poll, remove_peer = owner.post_write, owner.poll, owner.remove_peer
    hanging: dict[int, tuple[Any, str]] = {}  # by handle, the end and the peer
    given_up: dict[int, Any] = {}  # by handle, the end
    handles = itertools.count(-1, -1)  # which no transport gives

    @wraps(remove_peer)
    def give_up(self: Any, agent: str) -> None:
        for handle in [each for each, write in hanging.items() if write == (self, agent)]:
            given_up[handle], _ = hanging.pop(handle)
        remove_peer(self, agent)

    @wraps(poll)
    def poll_all(self: Any) -> list[WriteDone | Notification]:
        if transport is NixlTransport and points.strikes("deaf"):
            deafen(self._ports, self._peer_ports)
        events: list[WriteDone | Notification] = poll(self)
        for handle in [each for each, end in given_up.items() if end is self]:
            del given_up[handle]
            events.append(WriteDone(handle, "the peer was removed"))
        return events

    @wraps(post_write)
    def spoilt(
        self: Any,
        agent: str,
        source: Sequence[int],
        target: Sequence[int],
        *rest: Any,
    ) -> int:
        if points.strikes("fail"):
            raise TransferError("the write failed")
        if points.strikes("hang"):
            handle = next(handles)
            hanging[handle] = self, agent
            return handle
        if points.strikes("corrupt"):
            source = [block ^ 1 for block in source]  # the blocks next to the right ones
        points.reach("landing")
        posted: int = post_write(self, agent, source, target, *rest)
        return posted

    owner.post_write, owner.poll, owner.remove_peer = spoilt, poll_all, give_up


def _spoil(batch: Batch) -> None:
    for sequence in batch.sequences:
        if sequence.tokens[: len(DEADLY)] == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        if sequence.tokens[: len(POISON)] == POISON:
            raise RuntimeError("a poisonous request")
    for sequence in batch.decodes:
        if sequence.tokens[: len(DEADLY_LATER)] == DEADLY_LATER:
            os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """The role's own main, on wrapped classes."""
    role, flags = arguments[0], arguments[1:]
    worker_id = next(flag.partition("=")[2] for flag in flags if flag.startswith("--worker-id="))
    install(FaultPoints(Path(os.environ[FAULTS_DIR]), worker_id))
    return COMMANDS[role].load_main()(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
