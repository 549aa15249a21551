"""The router's connection to one worker: control (DEALER) and events (SUB).

Owns both sockets and the one task that serves them. Says hello first and is ready once the
worker accepted it; a refusal is final for this incarnation. A session that broke, or that the
worker forgot, is reported at once, then made anew with fresh sockets: what was queued belongs to
it. Frames that cannot be taken are counted and dropped. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from protocol.errors import ProtocolError
from protocol.messages import (
    ControlMessage,
    EventMessage,
    Hello,
    HelloAccepted,
    HelloRefused,
    Message,
    Ping,
    Pong,
    WorkerInfo,
)
from protocol.wire import decode_control, decode_event, encode
from router.fleet_metrics import FleetMetrics
from runtime.control import NO_HELLO
from runtime.gatekeeper import HANDSHAKE_FAILURES
from runtime.network import Network

log = logging.getLogger(__name__)

CLOSE_LINGER_MS = 100
RECONNECT_S = 0.2
MAX_AT_ONCE = 64


class LinkCallbacks(Protocol):
    """What a link reports, by worker id."""

    def on_ready(self, worker_id: str) -> None:
        """The worker accepted our hello."""
        ...

    def on_disconnected(self, worker_id: str) -> None:
        """The connection broke; what was sent or expected over it is lost."""
        ...

    def on_control(self, worker_id: str, message: ControlMessage) -> None:
        """A message over the control connection."""
        ...

    def on_event(self, worker_id: str, message: EventMessage) -> None:
        """A published message."""
        ...


@dataclass(frozen=True)
class LinkTimes:
    """`ping_interval_s`: between pings; `silence_s`: after it a worker is not responsive."""

    ping_interval_s: float
    silence_s: float


class WorkerLink:
    """One worker's connection; must be made on the running event loop."""

    def __init__(
        self,
        network: Network,
        info: WorkerInfo,
        hello: Hello,
        callbacks: LinkCallbacks,
        times: LinkTimes,
        metrics: FleetMetrics,
    ) -> None:
        self.refused: HelloRefused | None = None
        self._network = network
        self._info = info
        self._hello = hello
        self._callbacks = callbacks
        self._times = times
        self._metrics = metrics
        self._control: zmq.asyncio.Socket | None = None
        self._is_ready = False
        self._is_closed = False
        self._is_forgotten = False
        self._said_that_keys_differ = False
        self._last_heard = time.monotonic()
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"link to {info.worker_id}"
        )

    @property
    def is_ready(self) -> bool:
        """Whether the worker accepted our hello, and the connection stands."""
        return self._is_ready

    def is_responsive(self, now: float) -> bool:
        """Whether the worker spoke lately, by `time.monotonic`."""
        return now - self._last_heard < self._times.silence_s

    def send(self, message: Message) -> bool:
        """Queue a message; False if there is no connection or its queue is full."""
        return self._is_ready and self._post(message)

    def close(self) -> None:
        """Stop; the sockets close when the task has ended, see `wait_closed`."""
        self._is_closed = True
        self._is_ready = False
        self._task.cancel()

    @property
    def is_closed(self) -> bool:
        """Whether task and sockets are gone."""
        return self._task.done()

    async def wait_closed(self) -> None:
        """Wait until nothing of the link is left, after `close`."""
        await asyncio.wait([self._task])

    # -- the task ---------------------------------------------------------------------------

    async def _run(self) -> None:
        """Sessions, one after the other, until closed or refused."""
        while self.refused is None:
            try:
                await self._session()
            except Exception:
                log.exception("the link to %s failed", self._info.worker_id)
            if self._is_ready:
                self._is_ready = False
                self._callbacks.on_disconnected(self._info.worker_id)
            await asyncio.sleep(RECONNECT_S)

    async def _session(self) -> None:
        """One connection from hello to its end."""
        self._is_forgotten = False
        control = cast("zmq.asyncio.Socket", self._network.connecting(zmq.DEALER))
        events = cast("zmq.asyncio.Socket", self._network.connecting(zmq.SUB))
        monitor = control.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILURES)
        try:
            events.subscribe(b"")
            events.connect(self._info.events)
            control.connect(self._info.control)
            self._control = control
            self._post(self._hello)
            await _until_first(
                self._read(control, decode_control, self._take_control),
                self._read(events, decode_event, self._take_event),
                self._ping(),
                self._until_disconnected(monitor),
            )
        finally:
            self._control = None
            control.disable_monitor()
            monitor.close(linger=0)
            events.close(linger=0)
            control.close(linger=CLOSE_LINGER_MS)

    async def _read(
        self,
        socket: zmq.asyncio.Socket,
        decode: Callable[[bytes], Any],
        take: Callable[[Any], None],
    ) -> None:
        """Takes what comes; what has come already is taken in one turn of the loop, so that
        the tokens of several steps leave together where we are behind."""
        at_once = cast("zmq.Socket[bytes]", zmq.Socket.shadow(socket))
        waiting: deque[list[bytes]] = deque()
        while self._listens:
            if not waiting:
                waiting.append(await socket.recv_multipart())
                self._last_heard = time.monotonic()
                _drain(at_once, waiting)
            message = self._decoded(waiting.popleft(), decode)
            if message is not None:
                take(message)

    @property
    def _listens(self) -> bool:
        return self.refused is None and not self._is_forgotten

    def _decoded(self, frames: list[bytes], decode: Callable[[bytes], Any]) -> Any:
        """The message, or None, and counted, for frames that are none."""
        if len(frames) != 1:
            self._metrics.refused.labels("frame_count").inc()
            return None
        try:
            return decode(frames[0])
        except ProtocolError as error:
            self._metrics.refused.labels("undecodable").inc()
            log.debug("dropped a frame of %s: %s", self._info.worker_id, error)
            return None

    async def _ping(self) -> None:
        nonce = 0
        while True:
            await asyncio.sleep(self._times.ping_interval_s)
            nonce += 1
            self.send(Ping(nonce=nonce))

    async def _until_disconnected(self, monitor: zmq.asyncio.Socket) -> None:
        """Returns when the control connection ended, or its keys did not match."""
        event = parse_monitor_message(await monitor.recv_multipart())
        if event["event"] == zmq.EVENT_DISCONNECTED:
            return
        self._metrics.refused.labels("handshake").inc()
        if not self._said_that_keys_differ:
            self._said_that_keys_differ = True
            log.warning(
                "the handshake with %s failed: is its BATON_CLUSTER_SECRET ours?",
                self._info.worker_id,
            )

    def _post(self, message: Message) -> bool:
        if self._control is None or self._is_closed:
            return False
        sent = cast("asyncio.Future[Any]", self._control.send(encode(message), zmq.DONTWAIT))
        return sent.done() and sent.exception() is None

    def _take_control(self, message: ControlMessage) -> None:
        if isinstance(message, HelloAccepted):
            self._accepted(message)
        elif message == NO_HELLO:
            self._is_forgotten = True
        elif isinstance(message, HelloRefused):
            self._refuse(message)
        elif not self._is_ready:
            self._metrics.refused.labels("no_hello").inc()
        elif not isinstance(message, Pong):
            self._callbacks.on_control(self._info.worker_id, message)

    def _accepted(self, message: HelloAccepted) -> None:
        """Ready, if the worker that answers is the one that registered."""
        registered = f"{self._info.worker_id}/{self._info.incarnation}"
        answering = f"{message.worker_id}/{message.incarnation}"
        if registered != answering:
            self._refuse(HelloRefused(what="worker", ours=answering, theirs=registered))
        elif not self._is_ready:
            self._is_ready = True
            self._callbacks.on_ready(self._info.worker_id)

    def _refuse(self, refused: HelloRefused) -> None:
        self.refused = refused
        self._is_ready = False
        log.error(
            "%s refused the connection and is not used: %s is %s here and %s there",
            self._info.worker_id, refused.what, refused.theirs, refused.ours,
        )  # fmt: skip

    def _take_event(self, message: EventMessage) -> None:
        if self._is_ready:
            self._callbacks.on_event(self._info.worker_id, message)


def _drain(socket: zmq.Socket[bytes], waiting: deque[list[bytes]]) -> None:
    """Adds what can be received without waiting, within bounds."""
    for _ in range(MAX_AT_ONCE):
        try:
            waiting.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return


async def _until_first(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until the first ends, then end the others; raises what the first one raised."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
