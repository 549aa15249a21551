"""Control links to the sources of our KV blocks, one per incarnation.

Links to the fleet's prefill workers open as soon as the workers are known; links to other workers,
which hand requests over or hold cached blocks, open when needed. A link sends Hello and the
descriptor of our pool, and closes when the peer is gone. Owns the links; the sink owns the fences
around blocks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import zmq

from process.process_watch import WatchedProcess
from process.sockets.control import ControlLink
from protocol.control_message import ControlMessage
from protocol.errors import ProtocolError
from protocol.handoff_messages import PeerDescriptor, PoolRefused
from protocol.message_base import Message
from protocol.messages import KvPeer, Role
from protocol.registration import WorkerInfo, WorkerState, generation
from worker.host import Surroundings

log = logging.getLogger(__name__)

_LOOK_S = 0.05
_MEET_S = 0.1
_LAPSED = "it is silent and its lease has ended"


@dataclass
class _Link:
    control: ControlLink
    worker_id: str
    process: WatchedProcess | None  # if the peer is known to run on our machine
    is_leaving: bool  # the peer drains, so its end is expected
    descriptor: PeerDescriptor  # our pool, as the peer knows it
    next_look: float = 0.0
    resets: int = 0
    num_refused: int = 0
    refusal: str = ""  # why the peer never writes to the pool of `descriptor`


class SourcePeers:
    """Workers that send us blocks, by incarnation.

    - A peer on our machine is lost when its process has ended, and not before: a stopped process
      may continue in the middle of a write. The peer's answer to our Hello says where it runs; our
      view of the fleet may say so earlier.
    - A peer elsewhere is lost when it has been silent for `silence_s` and its lease has ended: it
      posts no writes after its own lease may have ended.
    - A peer that refuses us, or is another incarnation than named, is lost at once: it has no grant
      of ours, because it never had one or has released all.
    - A peer that has never answered is lost after `silence_s`, alive or not: our grants are still
      queued here.
    - A peer that falls silent after it has answered may still write at any time. It counts as
      `silent`, and requests need not wait for it.
    """

    def __init__(self, around: Surroundings, poller: zmq.Poller, silence_s: float) -> None:
        """The links' sockets are registered with `poller` while they are open."""
        self._around = around
        self._poller = poller
        self._silence_s = silence_s
        self._links: dict[str, _Link] = {}
        self._met: set[str] = set()
        self._why_gone: dict[str, str] = {}
        self._next_meeting = 0.0
        self._unreachable: list[str] = []
        self._neighbours: dict[str, set[str]] = {}  # of peers that were lost on other machines
        self._reset: list[str] = []
        self._descriptor = around.descriptor
        self.refused = 0
        """Frames from sources that were foreign or corrupt."""

    @property
    def num_links(self) -> int:
        """Open links."""
        return len(self._links)

    def connect_new(self, now: float) -> None:
        """Open a link to each prefill worker that is new in the fleet, so that the first handoff of
        a pair does not wait for its connection. Each worker is tried once."""
        if now < self._next_meeting:
            return
        self._next_meeting = now + _MEET_S
        members = self._around.members()
        for info in members:
            link = self._links.get(info.incarnation)
            if link is not None:
                link.is_leaving |= info.state is WorkerState.DRAINING
            elif info.incarnation not in self._met and self._may_send_to_us(info):
                self.connect(_peer_of(info))
        self._met = {info.incarnation for info in members}
        self._why_gone = {each: why for each, why in self._why_gone.items() if each in self._met}

    def retry_closed(self) -> None:
        """Make the next `connect_new` open again the links that were closed although their workers
        are in the fleet."""
        self._met.clear()

    def obstacles(self, now: float) -> dict[str, str | None]:
        """For each prefill worker that stays in the fleet, by worker id: why it cannot send to us,
        or None if it can. Call it after `receive`."""
        return {
            info.worker_id: self._obstacle(info, now)
            for info in self._around.members()
            if info.role is Role.PREFILL
            and info.state not in (WorkerState.LOADING, WorkerState.DRAINING)
        }

    def _obstacle(self, info: WorkerInfo, now: float) -> str | None:
        link = self._links.get(info.incarnation)
        if difference := self._difference(info):
            return difference
        if link is None:
            return self._why_gone.get(info.incarnation, "not connected yet")
        if link.refusal:
            return link.refusal
        if link.control.accepted is None:
            return f"nobody has answered yet at {link.control.endpoint}"
        silent_s = link.control.silent_s(now)
        return f"silent for {silent_s:.0f} s" if silent_s >= self._silence_s else None

    def _may_send_to_us(self, info: WorkerInfo) -> bool:
        is_ready = info.role is Role.PREFILL and info.state is WorkerState.READY
        return is_ready and self._difference(info) is None

    def _difference(self, info: WorkerInfo) -> str | None:
        """The difference that keeps a worker from sending to us, in words; None if there is
        none."""
        hello, transport = self._around.hello, self._around.descriptor.transport
        for what, theirs, ours in (
            ("protocol version", info.protocol_version, hello.protocol_version),
            ("KV layout fingerprint", info.layout_fingerprint, hello.layout_fingerprint),
            ("transport", info.transport, transport),
        ):
            if theirs != ours:
                own = generation(hello.weight_version, hello.revision)
                named = [f" ({each})" if each else "" for each in (info.generation, own)]
                return f"its {what} is {theirs}{named[0]}, ours is {ours}{named[1]}"
        return None

    def takers(self) -> list[KvPeer]:
        """The ready workers that can use our cached blocks: workers of our role or, if there are
        none, other workers."""
        hello = self._around.hello
        ready = [
            info
            for info in self._around.members()
            if info.state is WorkerState.READY
            and info.worker_id != hello.sender
            and self._difference(info) is None
        ]
        own = [info for info in ready if info.role is hello.role]
        return [_peer_of(info) for info in own or ready]

    @property
    def is_seen_to_drain(self) -> bool:
        """Whether our view of the fleet is newer than the announcement that we drain."""
        us = self._around.hello.sender
        return any(
            info.worker_id == us and info.state is WorkerState.DRAINING
            for info in self._around.members()
        )

    def look_again(self) -> None:
        """Bring our view of the fleet up to date soon."""
        self._around.look_again()

    def leaving(self, worker_id: str) -> KvPeer | None:
        """The worker with this id, if its cached blocks are of use here."""
        for info in self._around.members():
            if info.worker_id == worker_id and self._difference(info) is None:
                return _peer_of(info)
        return None

    def connect(self, peer: KvPeer, is_leaving: bool = False) -> None:
        """Open the link to a peer unless it is open. `take_lost` reports a peer whose link cannot
        be opened. `is_leaving`: the peer drains, so its end is expected."""
        if link := self._links.get(peer.incarnation):
            link.is_leaving |= is_leaving
            return
        try:
            control = ControlLink(self._around.network, peer.control, self._around.hello)
        except ProtocolError as error:
            log.warning("worker %s: %s", peer.worker_id, error)
            self._unreachable.append(peer.incarnation)
            return
        info = self._around.find(peer.worker_id, peer.incarnation)
        is_leaving |= info is not None and info.state is WorkerState.DRAINING
        process = None if info is None else self._process_at(info.machine, info.pid)
        descriptor = self._descriptor
        link = _Link(control, peer.worker_id, process, is_leaving, descriptor)
        self._links[peer.incarnation] = link
        self._poller.register(control.socket, zmq.POLLIN)
        control.send(descriptor)

    def is_answering(self, incarnation: str, now: float) -> bool:
        """Whether this very incarnation has accepted us and is not silent."""
        link = self._links.get(incarnation)
        if link is None or link.control.accepted is None:
            return False
        is_it = link.control.accepted.incarnation == incarnation
        return is_it and link.control.silent_s(now) < self._silence_s

    def is_connecting(self, incarnation: str) -> bool:
        """Whether the peer has not answered our Hello yet."""
        link = self._links.get(incarnation)
        return link is not None and link.control.accepted is None

    @property
    def descriptor(self) -> PeerDescriptor:
        """Our pool, as it is introduced to new peers."""
        return self._descriptor

    @property
    def agents(self) -> set[str]:
        """The names under which peers know our pool, or will know it."""
        return {self._descriptor.agent, *(e.descriptor.agent for e in self._links.values())}

    def agent_for(self, incarnation: str) -> str:
        """The name under which this peer knows our pool."""
        link = self._links.get(incarnation)
        return (self._descriptor if link is None else link.descriptor).agent

    def introduce(self, incarnation: str, descriptor: PeerDescriptor) -> None:
        """Introduce our pool by this descriptor to this peer and to new ones."""
        self._descriptor = descriptor
        link = self._links.get(incarnation)
        if link is not None:
            link.descriptor, link.refusal = descriptor, ""
            link.control.send(descriptor)

    def note_refusal(self, incarnation: str, refused: PoolRefused) -> None:
        """Note that a source never writes to our pool, unless the pool has another name by now."""
        link = self._links.get(incarnation)
        if link is not None and refused.agent == link.descriptor.agent:
            link.refusal = refused.reason

    @property
    def refusals(self) -> dict[str, str]:
        """Why sources never write to our pool, by incarnation; until their links close."""
        return {name: link.refusal for name, link in self._links.items() if link.refusal}

    def send(self, incarnation: str, message: Message) -> None:
        """Queue a message. Without a link it is dropped; the sink's sweep repeats it."""
        link = self._links.get(incarnation)
        if link is not None:
            link.control.send(message)

    def receive(self) -> list[tuple[str, ControlMessage]]:
        """The messages of sources, each with the incarnation of its source."""
        received = []
        for incarnation, link in self._links.items():
            received += [(incarnation, message) for message in link.control.receive()]
            num_refused = link.control.dropped["foreign"] + link.control.dropped["undecodable"]
            self.refused += num_refused - link.num_refused
            link.num_refused = num_refused
            if link.control.resets != link.resets:
                link.resets, link.refusal = link.control.resets, ""
                link.control.send(link.descriptor)
                self._reset.append(incarnation)
        return received

    def reset(self) -> list[str]:
        """Incarnations that lost their connection state with us and accepted us again since the
        last call: their messages may be lost."""
        reset, self._reset = self._reset, []
        return reset

    def take_lost(self, now: float) -> list[str]:
        """Incarnations that were lost since the last call; their links are closed."""
        gone, self._unreachable = self._unreachable, []
        for incarnation, link in list(self._links.items()):
            link.control.tick(now)
            reason = self._reason_to_close(incarnation, link, now)
            if reason:
                level = logging.INFO if link.is_leaving else logging.WARNING
                log.log(level, "worker %s is gone: %s", link.worker_id, reason)
                self._why_gone[incarnation] = reason
                self._close(incarnation)
                gone.append(incarnation)
                if reason == _LAPSED:
                    self._neighbours[incarnation] = self._others_than(link, now)
        return gone

    def neighbours_of_lapsed(self, incarnation: str) -> set[str] | None:
        """For a peer that `take_lost` reported and that may only be stopped, on another machine:
        the addresses of the peers that answer, or none if it may have written from others' hosts.
        None for other peers, and after the first call."""
        return self._neighbours.pop(incarnation, None)

    def _others_than(self, lost: _Link, now: float) -> set[str]:
        if lost.control.accepted is not None and not lost.control.accepted.machine:
            return set()
        answering = {
            link.control.address
            for link in self._links.values()
            if link.control.silent_s(now) < self._silence_s
        }
        return answering - {lost.control.address, ""}

    def silent(self, now: float) -> list[str]:
        """Incarnations that have sent nothing for `silence_s`. Call it after `receive`, so that
        messages that arrived during a long step count."""
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
            return _LAPSED
        return None

    def _process_at(self, machine: str, pid: int) -> WatchedProcess | None:
        is_near = machine and machine == self._around.machine
        return WatchedProcess(pid) if is_near else None

    def _close(self, incarnation: str) -> None:
        link = self._links.pop(incarnation)
        self._poller.unregister(link.control.socket)
        link.control.close()


def _peer_of(info: WorkerInfo) -> KvPeer:
    return KvPeer(worker_id=info.worker_id, incarnation=info.incarnation, control=info.control)
