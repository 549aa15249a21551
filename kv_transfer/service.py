"""The worker's interface to the transfer thread: commands in, events out, without waiting.

Owns the thread, and through it the transport. Commands return at once; `drain()` returns their
results as events, and `wake` is called when there are some. The thread polls every `EAGER_PERIOD_S`
while writes are outstanding, every `EXPECTING_PERIOD_S` while data is expected (another worker
computes a prompt), otherwise every `IDLE_PERIOD_S`; it never spins. If the thread dies of an error,
it reports an event, and everything outstanding fails, as do all later commands.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from kv_transfer.transfer_loop import (
    PeerFailed,
    ServiceFailed,
    TransferEvent,
    TransferLoop,
    WriteCommand,
    WriteFinished,
    now_us,
)
from kv_transfer.transports.interface import PoolMemory, SharesByGroup, Transport
from kv_transfer.transports.memory_file import SharedMemory
from protocol.errors import TransferError

EAGER_PERIOD_S = 100e-6
EXPECTING_PERIOD_S = 1e-3
"""With a shorter period, the thread would interrupt computation on the same core too often."""
IDLE_PERIOD_S = 25e-3
"""A longer wait: a command, such as one to expect data, ends it at once."""
START_TIMEOUT_S = 60.0
ALLOCATE_TIMEOUT_S = 600.0
"""A long time, because pools may have hundreds of gigabytes, and the kernel clears a few gigabytes
a second."""
CLOSE_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True)
class _AddPeer:
    agent: str
    descriptor: bytes
    num_blocks: int
    shares: SharesByGroup


@dataclass(frozen=True)
class _RemovePeer:
    agent: str


@dataclass(frozen=True)
class _Renew:
    failed: str


@dataclass(frozen=True)
class _Retire:
    agent: str


@dataclass(frozen=True)
class _Expect:
    data: bool


@dataclass(frozen=True)
class _Call(Generic[_T]):
    """A call during start-up whose caller waits for the result."""

    function: Callable[[Transport], _T]
    result: Future[_T]


@dataclass(frozen=True)
class _Close:
    pass


@dataclass(frozen=True)
class _Hold:
    until: Callable[[], float]


_Command = (
    WriteCommand | _Hold | _AddPeer | _RemovePeer | _Renew | _Retire | _Expect | _Call[Any] | _Close
)


class TransferService:
    """Moves blocks in a thread of its own. Any thread may call its methods."""

    def __init__(
        self,
        open_transport: Callable[[], Transport],
        wake: Callable[[], None],
        write_timeout_s: float = 10.0,
        wall_us: Callable[[], int] = now_us,
    ) -> None:
        """`wake` is called by the transfer thread; it must neither block nor raise. `wall_us`: see
        `TransferLoop`."""
        self._open_transport = open_transport
        self._wake = wake
        self._write_timeout_s = write_timeout_s
        self._wall_us = wall_us
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._lock = threading.Lock()  # guards the next three attributes
        self._events: list[TransferEvent] = []
        self._ended: str | None = "the transfer service is not started"
        self._thread: threading.Thread | None = None
        self._is_expecting = False
        self._transport: Transport | None = None
        self.transport_name = ""
        self.paths: tuple[str, ...] = ()
        self.agent = ""

    def start(self) -> None:
        """Start the thread and open the transport in it. Raises ConfigError, TransferError."""
        opened: Future[Transport] = Future()
        with self._lock:
            if self._thread is not None:
                raise ValueError("the transfer service was started before")
            self._ended = None
            self._thread = threading.Thread(target=self._run, args=(opened,), name="kv-transfer")
            self._thread.start()
        transport = _wait_for(opened)
        self.transport_name, self.agent = transport.name, transport.agent
        self.paths = transport.paths
        self._transport = transport

    def allocate(self, num_bytes: int) -> SharedMemory | None:
        """The memory in which the pool must live; None if any memory will do. Blocks; for
        start-up."""
        return self._call(lambda transport: transport.allocate(num_bytes), ALLOCATE_TIMEOUT_S)

    def register(self, pool: PoolMemory) -> bytes:
        """Register the pool and return the descriptor for peers. Blocks; for start-up."""

        def register(transport: Transport) -> bytes:
            transport.register(pool)
            return transport.descriptor()

        return self._call(register)

    def add_peer(
        self, agent: str, descriptor: bytes, num_blocks: int, shares: SharesByGroup = ()
    ) -> None:
        """Add a peer that the caller has verified: PeerAdded or PeerFailed follows. With `shares`,
        writes to the peer copy only these pieces of each block."""
        self._submit(_AddPeer(agent, descriptor, num_blocks, shares))

    def remove_peer(self, agent: str) -> None:
        """Forget a peer; its outstanding writes fail."""
        self._submit(_RemovePeer(agent))

    def renew(self, failed: str) -> None:
        """Replace our end of this name, to which peers cannot write. TargetRenewed follows if the
        transport has another end."""
        self._submit(_Renew(failed))

    def retire(self, agent: str) -> None:
        """Release our former end of this name: no peer writes to it any more."""
        self._submit(_Retire(agent))

    def write(self, command: WriteCommand) -> None:
        """Copy own blocks into an agent's: WriteFinished with the command's key follows.

        A write that is not posted before its `post_before`, seconds of `time.monotonic`, fails.
        """
        self._submit(command)

    def expect(self, data: bool) -> None:
        """Set whether peers are about to write here; the thread polls more often while they are."""
        if data != self._is_expecting:
            self._is_expecting = data
            self._submit(_Expect(data))

    def disconnect(self, kept: Collection[str]) -> int:
        """Break the connections over which peers may write here, except those with the addresses
        in `kept`: of this process before this call returns; see `Transport.disconnect`."""
        return 0 if self._transport is None else self._transport.disconnect(kept)

    @property
    def is_disconnecting(self) -> bool:
        """Whether other processes of this worker may still have such connections."""
        return self._transport is not None and self._transport.is_disconnecting

    def hold(self, until: Callable[[], float]) -> None:
        """Post no write at or after `until()`, which is called before each write."""
        self._submit(_Hold(until))

    def drain(self) -> list[TransferEvent]:
        """All events since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close the transport and end the thread. Raises TransferError if the thread hangs."""
        self._submit(_Close())
        thread = self._thread
        if thread is None:
            return
        thread.join(CLOSE_TIMEOUT_S)
        if thread.is_alive():
            raise TransferError(f"the transfer thread did not end within {CLOSE_TIMEOUT_S:g} s")

    def _call(self, function: Callable[[Transport], _T], timeout_s: float = START_TIMEOUT_S) -> _T:
        call = _Call(function, Future())
        self._submit(call)
        return _wait_for(call.result, timeout_s)

    def _submit(self, command: _Command) -> None:
        with self._lock:
            ended = self._ended
            if ended is None:
                self._commands.put(command)
        if ended is not None:
            self._publish(_refuse(command, ended))

    def _publish(self, events: list[TransferEvent]) -> None:
        if events:
            with self._lock:
                self._events.extend(events)
            self._wake()

    # -- in the thread -------------------------------------------------------------------

    def _run(self, opened: Future[Transport]) -> None:
        try:
            transport = self._open_transport()
        except Exception as error:  # noqa: BLE001 - the caller of start() gets it
            self._end(str(error))
            opened.set_exception(error)
            return
        events: list[TransferEvent] = []
        loop = TransferLoop(transport, events.append, self._write_timeout_s, wall_us=self._wall_us)
        opened.set_result(transport)
        reason = "the transfer service was closed"
        try:
            self._work(loop, events)
        except Exception as error:  # noqa: BLE001 - the top of the thread
            _log.exception("the transfer thread ends")
            reason = f"the transfer thread ended: {error!r}"
            loop.fail_outstanding(reason)
            events.append(ServiceFailed(reason))
        try:
            loop.close()
        except Exception:  # noqa: BLE001 - the top of the thread
            _log.exception("the transport was not closed cleanly")
        self._publish(events)
        self._end(reason)

    def _work(self, loop: TransferLoop, events: list[TransferEvent]) -> None:
        """Carry out queued commands, poll, and publish events, until the close command."""
        expecting = closing = False
        while not closing:
            period_s = EXPECTING_PERIOD_S if expecting else IDLE_PERIOD_S
            if loop.has_writes_under_way:
                period_s = EAGER_PERIOD_S
            command = self._next_command(period_s)
            while command is not None and not closing:
                if isinstance(command, _Expect):
                    expecting = command.data
                    loop.transport.expect(expecting)
                closing = isinstance(command, _Close)
                _carry_out(command, loop, events)
                command = self._next_command(0.0)
            loop.poll()
            self._publish(events)
            events.clear()

    def _next_command(self, wait_s: float) -> _Command | None:
        try:
            return self._commands.get(wait_s > 0, wait_s or None)
        except Empty:
            return None

    def _end(self, reason: str) -> None:
        with self._lock:
            self._ended = reason
        while (command := self._next_command(0.0)) is not None:
            self._publish(_refuse(command, reason))


def _carry_out(command: _Command, loop: TransferLoop, events: list[TransferEvent]) -> None:
    try:
        match command:
            case WriteCommand():
                loop.write(command)
            case _AddPeer(agent, descriptor, num_blocks, shares):
                loop.add_peer(agent, descriptor, num_blocks, shares)
            case _RemovePeer(agent):
                loop.remove_peer(agent)
            case _Renew(failed):
                loop.renew(failed)
            case _Retire(agent):
                loop.transport.retire(agent)
            case _Hold(until):
                loop.holds_until = until
            case _Call():
                _answer(command, loop.transport)
    except Exception as error:
        events += _refuse(command, f"the transfer thread ended: {error!r}")
        raise


def _answer(call: _Call[_T], transport: Transport) -> None:
    try:
        call.result.set_result(call.function(transport))
    except Exception as error:  # noqa: BLE001 - the waiting caller gets it
        call.result.set_exception(error)


def _refuse(command: _Command, reason: str) -> list[TransferEvent]:
    """The events that fail a command after the thread has ended."""
    match command:
        case WriteCommand(key=key):
            return [WriteFinished(key, reason, 0, 0)]
        case _AddPeer(agent=agent):
            return [PeerFailed(agent, reason)]
        case _Call(result=result):
            result.set_exception(TransferError(reason))
    return []


def _wait_for(result: Future[_T], timeout_s: float = START_TIMEOUT_S) -> _T:
    try:
        return result.result(timeout_s)
    except TimeoutError as error:
        raise TransferError("the transfer thread does not answer") from error
