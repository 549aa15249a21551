"""Control links to the workers that send us KV blocks, one per incarnation.

They are the fleet's prefill workers, to which a link opens as soon as they are known, and decode
workers that hand requests over, to which it opens when it is needed. It says Hello, then tells the
peer how to reach our pool, and closes when the peer is gone. Owner of the links; the fence around
blocks is the receiver's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import zmq

from process.process_watch import WatchedProcess
from process.sockets.control import ControlLink
from protocol.errors import ProtocolError
from protocol.messages import ControlMessage, Message, PrefillPeer, Role
from protocol.registration import WorkerInfo, WorkerState
from worker.assembly import Surroundings

log = logging.getLogger(__name__)

_LOOK_S = 0.05
_MEET_S = 0.1


@dataclass
class _Link:
    control: ControlLink
    worker_id: str
    process: WatchedProcess | None  # if it is known to run on our machine
    is_leaving: bool  # it drains, and is meant to go
    next_look: float = 0.0
    resets: int = 0
    num_refused: int = 0


class PrefillPeers:
    """Workers that send, by incarnation.

    A peer on our machine is gone as soon as its process has ended, and not before: one that is
    stopped may go on in the middle of a write. The peer says itself where it runs, in its answer to
    our Hello; before that answer our view of the fleet may know. One elsewhere is gone when it is silent for
    `silence_s` and its lease has ended; it posts nothing once its own lease may have. One that
    refuses us, or is another incarnation than was named, is gone at once: it never held a grant of
    ours, or has let go of all. So is one that never answered us within `silence_s`, alive or not:
    grants wait for that answer, here. One that falls silent later may yet write, but it is not
    known when: it is `silent`, and what it owes us need not be waited for.
    """

    def __init__(self, around: Surroundings, poller: zmq.Poller, silence_s: float) -> None:
        """`poller` gets the links' sockets for as long as they are open."""
        self._around = around
        self._poller = poller
        self._silence_s = silence_s
        self._links: dict[str, _Link] = {}
        self._met: set[str] = set()
        self._next_meeting = 0.0
        self._unreachable: list[str] = []
        self._reset: list[str] = []
        self.refused = 0
        """Frames from prefill workers that were foreign or corrupt."""

    @property
    def num_links(self) -> int:
        """Open links."""
        return len(self._links)

    def meet(self, now: float) -> None:
        """Open links to prefill workers that are new in the fleet, once each: the first handoff
        of a pair need not wait for its connection then."""
        if now < self._next_meeting:
            return
        self._next_meeting = now + _MEET_S
        members = self._around.members()
        for info in members:
            link = self._links.get(info.incarnation)
            if link is not None:
                link.is_leaving |= info.state is WorkerState.DRAINING
            elif info.incarnation not in self._met and self._may_send_to_us(info):
                self.connect(
                    PrefillPeer(
                        worker_id=info.worker_id,
                        incarnation=info.incarnation,
                        control=info.control,
                    )
                )
        self._met = {info.incarnation for info in members}

    def _may_send_to_us(self, info: WorkerInfo) -> bool:
        hello, ours = self._around.hello, self._around.descriptor.transport
        return (
            info.role is Role.PREFILL
            and info.state is WorkerState.READY
            and info.protocol_version == hello.protocol_version
            and info.layout_fingerprint == hello.layout_fingerprint
            and info.transport == ours
        )

    def connect(self, peer: PrefillPeer) -> None:
        """Open the link to a peer unless it is open; one that cannot be opened is `gone`."""
        if peer.incarnation in self._links:
            return
        try:
            control = ControlLink(self._around.network, peer.control, self._around.hello)
        except ProtocolError as error:
            log.warning("worker %s: %s", peer.worker_id, error)
            self._unreachable.append(peer.incarnation)
            return
        info = self._around.find(peer.worker_id, peer.incarnation)
        is_leaving = info is not None and info.state is WorkerState.DRAINING
        process = None if info is None else self._process_at(info.machine, info.pid)
        self._links[peer.incarnation] = _Link(control, peer.worker_id, process, is_leaving)
        self._poller.register(control.socket, zmq.POLLIN)
        control.send(self._around.descriptor)

    def send(self, incarnation: str, message: Message) -> None:
        """Queue a message; without a link it is dropped, and the receiver's sweep repeats it."""
        link = self._links.get(incarnation)
        if link is not None:
            link.control.send(message)

    def receive(self) -> list[tuple[str, ControlMessage]]:
        """What prefill workers sent, with their incarnation."""
        received = []
        for incarnation, link in self._links.items():
            received += [(incarnation, message) for message in link.control.receive()]
            num_refused = link.control.dropped["foreign"] + link.control.dropped["undecodable"]
            self.refused += num_refused - link.num_refused
            link.num_refused = num_refused
            if link.control.resets != link.resets:
                link.resets = link.control.resets
                link.control.send(self._around.descriptor)
                self._reset.append(incarnation)
        return received

    def reset(self) -> list[str]:
        """Incarnations that have forgotten us since the last call, and know us again: messages
        of theirs may be lost."""
        reset, self._reset = self._reset, []
        return reset

    def gone(self, now: float) -> list[str]:
        """Incarnations that are gone since the last call; their links are closed."""
        gone, self._unreachable = self._unreachable, []
        for incarnation, link in list(self._links.items()):
            link.control.tick(now)
            reason = self._reason_to_close(incarnation, link, now)
            if reason:
                level = logging.INFO if link.is_leaving else logging.WARNING
                log.log(level, "worker %s is gone: %s", link.worker_id, reason)
                self._close(incarnation)
                gone.append(incarnation)
        return gone

    def silent(self, now: float) -> list[str]:
        """Incarnations that have answered nothing for `silence_s`; to be called after `receive`,
        so that what came during a long step counts as heard."""
        return [
            incarnation
            for incarnation, link in self._links.items()
            if link.control.silent_s(now) >= self._silence_s
        ]

    def close(self) -> None:
        """Close all links."""
        for incarnation in list(self._links):
            self._close(incarnation)

    def _reason_to_close(self, incarnation: str, link: _Link, now: float) -> str | None:
        refused, accepted = link.control.refused, link.control.accepted
        if refused is not None:
            return f"its {refused.what} is {refused.ours}, ours is {refused.theirs}"
        if accepted is not None and accepted.incarnation != incarnation:
            return f"{link.control.endpoint} is another worker now"
        if link.process is None and accepted is not None:
            link.process = self._process_at(accepted.machine, accepted.pid)
        is_silent = link.control.silent_s(now) >= self._silence_s
        if is_silent and accepted is None and not link.control.resets:
            return f"nobody answers at {link.control.endpoint}"
        if link.process is not None:
            if now < link.next_look:
                return None
            link.next_look = now + _LOOK_S
            return "its process has ended" if link.process.has_ended() else None
        if is_silent and not self._around.is_alive(link.worker_id, incarnation):
            return "it is silent and its lease has ended"
        return None

    def _process_at(self, machine: str, pid: int) -> WatchedProcess | None:
        is_near = machine and machine == self._around.machine
        return WatchedProcess(pid) if is_near else None

    def _close(self, incarnation: str) -> None:
        link = self._links.pop(incarnation)
        self._poller.unregister(link.control.socket)
        link.control.close()
