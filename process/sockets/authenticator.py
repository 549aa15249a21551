"""Authenticates clients: the ZAP handler (ZeroMQ RFC 27) of one context, in its own thread.

Admits clients that prove possession of the one expected key, counts every failed handshake on the
sockets that it watches, and ends connections that send more than is read or that take the process's
last descriptors: without one libzmq would try to accept again and again. It needs a thread because
peers connect and send while a worker computes a long step. Invariant: the reading end of a monitor
is connected before the watched socket is bound, stays connected until monitoring ends, and has an
unlimited queue. Otherwise libzmq's I/O thread would wait for us to read, and pyzmq, which ends
monitoring while holding the GIL, would wait for that thread: a deadlock.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections import deque
from itertools import count
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from process.open_files import is_reserved
from process.sockets.inflow import CHECK_S, CONNECTION_EVENTS, Inflow, shut_accepted

log = logging.getLogger(__name__)

DOMAIN = b"baton"
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_KEY_FRAME = 6  # of a ZAP request: the client's public key, its last frame


class Gatekeeper:
    """Admits or refuses clients. Owns its thread and the thread's sockets.

    `num_turned_away` only grows.
    """

    def __init__(self, context: zmq.Context[Any], client_key: bytes) -> None:
        """`client_key`: the only public key (Z85) that is admitted."""
        self.num_turned_away = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(context)
        self._client_key = z85.decode(client_key)
        self._watched: list[zmq.Socket[Any]] = []
        self._monitor_numbers = count()
        self._new_monitors: deque[tuple[zmq.Socket[bytes], Inflow]] = deque()
        self._check_at = 0.0
        self._signal = self._context.socket(zmq.PAIR)
        self._signal.bind(f"inproc://baton-gatekeeper-{id(self)}")
        self._poller = zmq.Poller()
        self._monitors: dict[zmq.Socket[bytes], Inflow] = {}
        self._handler = self._context.socket(zmq.REP)
        self._handler.bind(_ZAP_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="gatekeeper", daemon=True)
        self._thread.start()

    def watch(self, socket: zmq.Socket[Any], inflow: Inflow) -> None:
        """Count the failed handshakes of a socket that is about to be bound or connected, and keep
        its `inflow`."""
        endpoint = f"inproc://baton-monitor-{id(self)}-{next(self._monitor_numbers)}"
        events = HANDSHAKE_FAILURES | CONNECTION_EVENTS | zmq.EVENT_MONITOR_STOPPED
        socket.monitor(endpoint, events)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect(endpoint)
        self._watched = [*(each for each in self._watched if not each.closed), socket]
        self._new_monitors.append((monitor, inflow))
        self._signal.send(b"")

    def close(self) -> None:
        """Stop. Sockets that are still open admit no more clients."""
        for socket in self._watched:
            if not socket.closed:
                socket.disable_monitor()
        self._signal.send(b"stop")
        self._thread.join()
        self._signal.close(linger=0)

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        commands = self._context.socket(zmq.PAIR)
        commands.connect(f"inproc://baton-gatekeeper-{id(self)}")
        self._poller.register(commands, zmq.POLLIN)
        self._poller.register(self._handler, zmq.POLLIN)
        try:
            while self._turn(commands):
                pass
        finally:
            for socket in (commands, self._handler, *self._monitors):
                socket.close(linger=0)

    def _turn(self, commands: zmq.Socket[bytes]) -> bool:
        """Serve the sockets that are ready; False after the command to stop."""
        for ready, _ in self._poller.poll(self._next_check()):
            if ready is commands:
                if commands.recv():  # b"stop" ends the thread; b"" announces a new monitor
                    return False
                self._add_monitor(*self._new_monitors.popleft())
            elif ready is self._handler:
                self._handler.send_multipart(self._judge(self._handler.recv_multipart()))
            else:
                self._take_event(ready)
        return True

    def _next_check(self) -> int | None:
        """Check all inflows if it is time; returns milliseconds until the next time, None if there
        is no connection."""
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + CHECK_S
            for inflow in self._monitors.values():
                inflow.check()
        has_connections = any(inflow.num_open for inflow in self._monitors.values())
        return round(1000 * (self._check_at - now)) if has_connections else None

    def _add_monitor(self, monitor: zmq.Socket[bytes], inflow: Inflow) -> None:
        self._monitors[monitor] = inflow
        self._poller.register(monitor, zmq.POLLIN)

    def _take_event(self, monitor: zmq.Socket[bytes]) -> None:
        event = parse_monitor_message(monitor.recv_multipart())
        if event["event"] == zmq.EVENT_MONITOR_STOPPED:
            self._poller.unregister(monitor)
            del self._monitors[monitor]
            monitor.close(linger=0)
            return
        if event["event"] == zmq.EVENT_ACCEPTED and is_reserved(event["value"]):
            shut_accepted(event["value"], event["endpoint"].decode())
            return
        if not event["event"] & HANDSHAKE_FAILURES:
            self._monitors[monitor].note(event["event"], event["value"])
            return
        self.num_turned_away += 1
        if self.num_turned_away.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...: bounded logs
            log.warning(
                "turned away a connection to %s that did not prove the cluster's secret "
                "(%d so far)",
                event["endpoint"].decode(errors="replace"),
                self.num_turned_away,
            )

    def _judge(self, frames: list[bytes]) -> list[bytes]:
        """The reply to a ZAP request."""
        request_id = frames[1] if len(frames) > 1 else b""
        is_known = (
            len(frames) == _KEY_FRAME + 1
            and frames[0] == _VERSION
            and frames[2] == DOMAIN
            and frames[5] == b"CURVE"
            and hmac.compare_digest(frames[_KEY_FRAME], self._client_key)
        )
        status, text = (b"200", b"OK") if is_known else (b"400", b"not of this cluster")
        return [_VERSION, request_id, status, text, b"", b""]
