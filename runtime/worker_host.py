"""What every worker process consists of besides its role: engine, sockets, transfers, reports.

Waits for whatever arrives first, runs steps, answers what any worker is asked. The role's loop
uses these services and tells the host nothing about requests but their number. All methods
belong to the loop's thread.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import zmq

from engine.engine import Engine, StepResult
from engine.kv_pool import KvPool
from engine.scheduler import Batch
from kv_transfer.authentication import verify_descriptor
from kv_transfer.handoff import Named
from kv_transfer.service import TransferService
from kv_transfer.transfer_loop import ServiceFailed, TransferEvent
from protocol.errors import ProtocolError, TransferError
from protocol.messages import (
    AttemptFailed,
    CacheDumpRequest,
    ControlMessage,
    Message,
    PeerDescriptor,
)
from runtime.clock import wall_us
from runtime.control import ControlServer, Peer
from runtime.intake import Intake
from runtime.lifecycle import StopSignal
from runtime.reporter import Reporter
from runtime.wakeup import Wakeup
from runtime.worker_settings import WorkerSettings

log = logging.getLogger(__name__)

IDLE_WAIT_MS = 20
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class WorkerParts:
    """What a host is assembled from; whoever made them closes them."""

    engine: Engine
    pool: KvPool
    transfers: TransferService
    server: ControlServer
    reporter: Reporter
    intake: Intake
    wakeup: Wakeup
    stop: StopSignal


class WorkerHost:
    """The services of one worker process."""

    def __init__(self, settings: WorkerSettings, worker_id: str, parts: WorkerParts) -> None:
        self.settings = settings
        self.worker_id = worker_id
        self.engine = parts.engine
        self.transfers = parts.transfers
        self.server = parts.server
        self.intake = parts.intake
        self.poller = zmq.Poller()
        self._pool = parts.pool
        self._reporter = parts.reporter
        self._wakeup = parts.wakeup
        self._stop = parts.stop
        self._transfer_peers: set[str] = set()
        self._is_busy = False
        self.poller.register(self.server.socket, zmq.POLLIN)
        self.poller.register(self._wakeup.fileno(), zmq.POLLIN)

    # -- the loop ---------------------------------------------------------------------------

    def is_finished(self, num_jobs: int) -> bool:
        """Whether the loop may end: told to stop, and no jobs left or their grace over."""
        if self._stop.since is None:
            return False
        grace_over = self.now() - self._stop.since >= self.settings.drain_grace_s
        return num_jobs == 0 or grace_over

    def wait(self) -> None:
        """Until something can be received; not at all after a step that computed something."""
        self.poller.poll(0 if self._is_busy else IDLE_WAIT_MS)
        self._wakeup.clear()

    def run_step(self, batch: Batch) -> StepResult | None:
        """Run a planned batch; None if it raised, which is logged and ends its attempts only."""
        self._is_busy = not batch.is_empty
        self.count("preemptions", len(batch.preempted))
        try:
            result = self.engine.run(batch)
        except Exception:  # the top of a task: whatever the engine raises fails its batch only
            names = [sequence.key for sequence in batch.sequences]
            log.exception("a step failed, its attempts end: %s", names)
            self.count("failed_steps")
            return None
        if self._is_busy:
            self.count("steps")
        return result

    def publish(self, num_handoffs: int) -> None:
        """Report load and cache, as far as it is due."""
        refused = sum(self.server.refused.values())
        if refused:
            self._reporter.counters["frames_refused"] = refused
        if self.server.num_turned_away:
            self._reporter.counters["peers_turned_away"] = self.server.num_turned_away
        self._reporter.publish(self.now(), num_handoffs)

    # -- for the role's handlers ------------------------------------------------------------

    def now(self) -> float:
        """Seconds of the monotonic clock, the same that the engine measures steps with."""
        return time.monotonic()

    def wall_us(self, monotonic_s: float | None = None) -> int:
        """Microseconds of the Unix epoch now, or at a reading of `now`."""
        ago_s = 0.0 if monotonic_s is None else self.now() - monotonic_s
        return wall_us() - round(ago_s * 1e6)

    def count(self, name: str, number: int = 1) -> None:
        """Add to one of the counters that load reports carry."""
        self._reporter.counters[name] += number

    def send(self, peer: Peer, message: Message) -> None:
        """Send, or count as undeliverable: `server.lost` names the peer soon."""
        if not self.server.send(peer, message):
            self.count("undeliverable_messages")

    def failure(self, attempt: Named, reason: str, retryable: bool) -> AttemptFailed:
        """The message that ends an attempt."""
        return AttemptFailed(
            request_id=attempt.request_id,
            attempt=attempt.attempt,
            worker_id=self.worker_id,
            reason=reason,
            retryable=retryable,
        )

    def answer_common(self, peer: Peer, message: ControlMessage) -> None:
        """What any worker is asked; anything else is counted and dropped."""
        if isinstance(message, CacheDumpRequest):
            self.send(peer, self._reporter.dump())
            return
        self.count("unexpected_messages")
        log.warning("%s %s sent an unexpected %s", peer.role, peer.name, type(message).__name__)

    def follow_common(self, event: TransferEvent) -> None:
        """What the transfer thread reports to any worker. Raises TransferError when it died."""
        if isinstance(event, ServiceFailed):
            raise TransferError(event.reason)
        log.debug("transfer thread: %s", event)

    def try_add_transfer_peer(self, message: PeerDescriptor) -> bool:
        """Make a peer's pool writable, if its descriptor is authentic and of our transport."""
        secret = self.settings.cluster_secret.encode()
        try:
            if message.transport != self.transfers.transport_name:
                raise ProtocolError(
                    f"transport differs: ours is {self.transfers.transport_name}, "
                    f"the peer's is {message.transport}"
                )
            verify_descriptor(
                secret, message.agent, message.descriptor, message.num_blocks, message.digest
            )
        except ProtocolError as error:
            log.warning("refused the pool of agent %s: %s", message.agent, error)
            self.count("descriptors_refused")
            return False
        if message.agent not in self._transfer_peers:
            self._transfer_peers.add(message.agent)
            self.transfers.add_peer(message.agent, message.descriptor, message.num_blocks)
        return True

    def forget_transfer_peer(self, agent: str) -> None:
        """The transport dropped this peer: its next descriptor adds it anew."""
        self._transfer_peers.discard(agent)

    def block_digests(self, blocks: Sequence[int]) -> list[bytes]:
        """A digest per pool block with `kv_checksum` on, else nothing."""
        if not self.settings.kv_checksum:
            return []
        return [_digest(self._pool, block) for block in blocks]


def _digest(pool: KvPool, block: int) -> bytes:
    data = pool.tensor[block].view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
