"""The router's connection to one worker: control (DEALER) and events (SUB).

Owns both sockets and the task that reopens them. Sends a hello first and is ready once the worker
accepts it; a refusal is final for this incarnation. A session that broke, or that the worker
forgot, is reported at once and then replaced with fresh sockets, because queued messages belong
to the old session. Messages that the worker sent before the end are taken first. Invalid frames are
counted and dropped. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from process.sockets.authenticator import HANDSHAKE_FAILURES
from process.sockets.encrypted_sockets import Network
from process.sockets.hello import NO_HELLO
from process.sockets.inflow import CONNECTION_EVENTS, OPENED, Inflow
from process.sockets.options import QUEUE_FRAMES
from protocol.control_message import ControlMessage
from protocol.errors import ProtocolError
from protocol.events import EventMessage
from protocol.message_base import Message
from protocol.messages import (
    Generate,
    Hello,
    HelloAccepted,
    HelloRefused,
    Pong,
    Prefill,
    StepTokens,
)
from protocol.registration import WorkerInfo
from protocol.wire import decode_control, decode_event, encode, joined, parts
from router.fleet.conditions import (
    BROKEN,
    CONNECTING,
    OTHER_SECRET,
    Condition,
    refused_by_worker,
    unreachable,
)
from router.fleet.frame_socket import FrameSocket
from router.fleet.inflow_checks import InflowChecks
from router.fleet.listener import LinkCallbacks
from router.fleet.pings import Pings
from router.fleet.step_parts import in_parts
from router.metrics import FleetMetrics

log = logging.getLogger(__name__)

CLOSE_LINGER_MS = 100
RECONNECT_S = 0.2
MAX_RECONNECT_S = 30.0
_clock = time.monotonic


@dataclass(frozen=True)
class LinkTimes:
    """Times of a link, in seconds. `ping_interval_s`: between pings. `silence_s`: after it, a
    silent worker is unresponsive. `unreachable_s`: after it, the log says that a worker has never
    answered."""

    ping_interval_s: float
    silence_s: float
    unreachable_s: float = 5.0


class WorkerLink:
    """One worker's connection. Create it on the running event loop."""

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
        self.session = ""
        self.num_legs = 0
        """Generate and Prefill messages that this session has sent."""
        self._network = network
        self._info = info
        self._hello = hello
        self._callbacks = callbacks
        self._times = times
        self._metrics = metrics
        self._control: FrameSocket | None = None
        self._ended: asyncio.Future[None] | None = None
        self._pinging: asyncio.TimerHandle | None = None
        self._is_ready = False
        self._is_closed = False
        self._said_that_keys_differ = False
        self.trouble: Condition | None = CONNECTING
        """Why the connection cannot be used; None while it can."""
        self._last_heard = time.monotonic()
        self._num_lies = 0
        self._pings = Pings()
        self.clock = self._pings.clock
        self._complaint = asyncio.get_running_loop().call_later(times.unreachable_s, self._complain)
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"link to {info.worker_id}"
        )

    @property
    def is_ready(self) -> bool:
        """Whether the worker accepted our hello and the connection is open."""
        return self._is_ready and self._control is not None

    @property
    def is_ending(self) -> bool:
        """Whether the connection broke, and its last messages are being taken."""
        return self._is_ready and self._control is None

    def is_responsive(self, now: float) -> bool:
        """Whether the worker sent anything within `silence_s`, by `time.monotonic`."""
        return now - self._last_heard < self._times.silence_s

    @property
    def silent_at(self) -> float:
        """The time from which on the worker is not responsive if it sends nothing more."""
        return self._last_heard + self._times.silence_s

    def send(self, message: Message) -> bool:
        """Queue a message; False if there is no connection or its queue is full."""
        is_sent = self._is_ready and self._post(message)
        self.num_legs += is_sent and isinstance(message, (Generate, Prefill))
        return is_sent

    def ping(self) -> int:
        """Send a ping, if there is a connection; returns the ping's number."""
        ping = self._pings.next()
        if self.send(ping):
            self._pings.sent(ping)
        return ping.nonce

    @property
    def last_pong(self) -> int:
        """The number of the latest ping that the worker has answered; 0 before the first."""
        return self._pings.last_answered

    async def wait_for_pong(self, number: int, timeout_s: float) -> None:
        """Wait until the worker has answered this ping or a later one, the connection is lost, or
        the timeout has passed."""
        if self._is_ready and self.last_pong < number:
            await self._pings.wait(number, timeout_s)

    def close(self) -> None:
        """Stop the link; its sockets close when the task has ended, see `wait_closed`."""
        self._is_closed = True
        self._complaint.cancel()
        self._end_ready()
        self._task.cancel()

    @property
    def is_closed(self) -> bool:
        """Whether the task and the sockets are gone."""
        return self._task.done()

    async def wait_closed(self) -> None:
        """After `close`, wait until the task and the sockets are gone."""
        await asyncio.wait([self._task])

    # -- the task ---------------------------------------------------------------------------

    async def _run(self) -> None:
        """Run sessions one after the other until the link is closed or refused. The pause between
        them grows with the number of sessions that ended because of the worker's impossible
        reports."""
        while self.refused is None:
            try:
                await self._session()
            except ProtocolError as error:
                self._num_lies += 1
                self._metrics.refused.add("impossible")
                log.warning("ended the connection to %s: %s", self._info.worker_id, error)
            except Exception:
                log.exception("the link to %s failed", self._info.worker_id)
            if self._is_ready:
                self._end_ready()
                self.trouble = BROKEN
                self._callbacks.on_disconnected(self._info.worker_id)
            await asyncio.sleep(min(RECONNECT_S * 1.5 ** min(self._num_lies, 16), MAX_RECONNECT_S))

    async def _session(self) -> None:
        """One connection from hello to its end. Raises the error of a message or a socket."""
        self._ended = asyncio.get_running_loop().create_future()
        connection: zmq.Socket[bytes] = self._network.connecting(zmq.DEALER)
        published: zmq.Socket[bytes] = self._network.connecting(zmq.SUB)
        control = self._serve(connection, self._reader(decode_control, self._take_control))
        events = self._serve(published, self._reader(decode_event, self._take_event))
        checks = InflowChecks(self._end_session)
        monitors = [
            self._serve(
                socket.get_monitor_socket(CONNECTION_EVENTS | HANDSHAKE_FAILURES),
                partial(take_event, checks.add(served)),
            )
            for socket, served, take_event in (
                (connection, control, self._on_monitor),
                (published, events, self._on_events_monitor),
            )
        ]
        try:
            published.subscribe(b"")
            published.connect(self._info.events)
            connection.connect(self._info.control)
            self._control = control
            self.session, self.num_legs = secrets.token_hex(8), 0
            self._post(msgspec.structs.replace(self._hello, session=self.session))
            self._ping_later()
            await self._ended
        finally:
            self._control = None
            self._callbacks.on_readiness()
            self._stop_pinging()
            checks.close()
            connection.disable_monitor()
            published.disable_monitor()
            for each in monitors:
                each.close()
            events.close()
            control.close(CLOSE_LINGER_MS)

    def _serve(
        self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], Iterator[None] | None]
    ) -> FrameSocket:
        """Pass received frames to `take` until the session ends; its errors end the session."""
        return FrameSocket(socket, take, self._end_session, QUEUE_FRAMES)

    def _end_session(self, error: Exception | None = None) -> None:
        """End the session; `_run` opens the next one unless the link is closed or refused."""
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    @property
    def _lasts(self) -> bool:
        """Whether a session is open."""
        return self._ended is not None and not self._ended.done()

    def _reader(
        self, decode: Callable[[bytes], Any], take: Callable[[Any], Iterator[None] | None]
    ) -> Callable[[list[bytes]], Iterator[None] | None]:
        """A callback that decodes frames and passes messages to `take` during the session;
        invalid frames are counted."""

        def read(frames: list[bytes]) -> Iterator[None] | None:
            ended = self._ended
            if ended is None or ended.done():
                return None
            self._last_heard = _clock()
            try:
                message = decode(frames[0] if len(frames) == 1 else joined(frames))
            except ProtocolError as error:
                self._metrics.refused.add("undecodable")
                log.debug("dropped a frame of %s: %s", self._info.worker_id, error)
                return None
            return take(message)

        return read

    def _ping_later(self) -> None:
        self._pinging = asyncio.get_running_loop().call_later(
            self._times.ping_interval_s, self._ping_again
        )

    def _ping_again(self) -> None:
        self.ping()
        self._ping_later()

    def _stop_pinging(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
            self._pinging = None

    def _on_events_monitor(self, inflow: Inflow, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        inflow.note(event["event"], event["value"])

    def _on_monitor(self, inflow: Inflow, frames: list[bytes]) -> None:
        """The control connection has ended, or the keys of the two ends did not match. ZeroMQ
        connects again by itself; the session that ends takes no notice."""
        event = parse_monitor_message(frames)
        inflow.note(event["event"], event["value"])
        control = self._control
        if not self._lasts or control is None or event["event"] & OPENED:
            return
        if event["event"] == zmq.EVENT_DISCONNECTED:
            self._control = None  # so that nothing more is sent
            self._callbacks.on_readiness()
            control.finish(self._end_session)  # messages that arrived before the end
            return
        self._metrics.refused.add("handshake")
        self._complaint.cancel()
        self.trouble = OTHER_SECRET
        if not self._said_that_keys_differ:
            self._said_that_keys_differ = True
            log.warning(
                "the handshake with %s failed: is its BATON_CLUSTER_SECRET ours?",
                self._info.worker_id,
            )
        self._end_session()

    def _post(self, message: Message) -> bool:
        if self._control is None or self._is_closed:
            return False
        return self._control.send(parts(encode(message)))

    def _take_control(self, message: ControlMessage) -> Iterator[None] | None:
        """Take a message. The tokens of many sequences are taken in parts, later."""
        if self._is_ready and type(message) is StepTokens:  # nearly every message
            if len(message.sequences) > 1:
                return self._take_in_parts(message)
            self._callbacks.on_control(self._info.worker_id, message)
        elif message == NO_HELLO or (self._control is None and isinstance(message, HelloAccepted)):
            self._end_session()  # this begins the next connection
        elif isinstance(message, HelloAccepted):
            self._accepted(message)
        elif isinstance(message, HelloRefused):
            self._refuse(message)
        elif not self._is_ready:
            self._metrics.refused.add("no_hello")
        elif isinstance(message, Pong):
            self._pings.answered(message)
        else:
            self._callbacks.on_control(self._info.worker_id, message)
        return None

    def _take_in_parts(self, message: StepTokens) -> Iterator[None]:
        """Take the tokens of some sequences in each step, until the session ends."""
        for part in in_parts(message):
            if self._is_ready:
                self._callbacks.on_control(self._info.worker_id, part)
            yield

    def _accepted(self, message: HelloAccepted) -> None:
        """Become ready, if the worker that answers is the registered one."""
        registered = f"{self._info.worker_id}/{self._info.incarnation}"
        answering = f"{message.worker_id}/{message.incarnation}"
        if registered != answering:
            self._refuse(HelloRefused(what="worker", ours=answering, theirs=registered))
        elif not self._is_ready:
            self._is_ready, self.trouble = True, None
            self._callbacks.on_readiness()
            self._complaint.cancel()
            self.ping()
            self._callbacks.on_ready(self._info.worker_id)

    def _complain(self) -> None:
        self.trouble = unreachable(self._info.control, self._times.unreachable_s)
        log.warning(
            "%s is registered, and has not answered at %s for %g s: is that address right, and "
            "reachable from here? (advertise_address and control_port of the worker)",
            self._info.worker_id, self._info.control, self._times.unreachable_s,
        )  # fmt: skip

    def _refuse(self, refused: HelloRefused) -> None:
        self.refused = refused
        self.trouble = refused_by_worker(refused)
        self._complaint.cancel()
        self._end_ready()
        self._end_session()
        log.error(
            "%s refused the connection and is not used: %s is %s here and %s there",
            self._info.worker_id, refused.what, refused.theirs, refused.ours,
        )  # fmt: skip

    def _end_ready(self) -> None:
        """Release every task that waits for a pong, because the connection is lost."""
        self._is_ready = False
        self._callbacks.on_readiness()
        self._pings.release_all()

    def _take_event(self, message: EventMessage) -> None:
        if self._is_ready:
            self._callbacks.on_event(self._info.worker_id, message)
