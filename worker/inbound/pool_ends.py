"""The ends of our transport that peers write to, and which peer writes to which.

A peer that has reconnected to an end and still cannot write to it is introduced to another end. Its
grants under the old name fail. As usual, their fences are lifted when the peer says that it writes
no more. An end is retired when no peer writes to it.
"""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec

from kv_transfer.authentication import authenticate_descriptor
from kv_transfer.transfer_loop import TargetRenewed
from protocol.handoff_messages import KvAsk, KvFetch, KvGrant, PoolUnreachable
from worker.host import WorkerHost
from worker.inbound.source_links import SourcePeers

log = logging.getLogger(__name__)

Named = TypeVar("Named", KvAsk, KvGrant, KvFetch)


class PoolEnds:
    """Belongs to the loop's thread."""

    def __init__(self, host: WorkerHost, peers: SourcePeers) -> None:
        self._secret = host.settings.cluster_secret.encode()
        self._transfers = host.transfers
        self._peers = peers
        self._waiting: dict[str, str] = {}  # by peer, the name that it could not write to
        self._former: set[str] = set()

    def named(self, peer: str, message: Named) -> Named:
        """The message, with the name under which the peer knows our pool."""
        agent = self._peers.agent_for(peer)
        if message.agent == agent:
            return message
        return msgspec.structs.replace(message, agent=agent)

    def on_unreachable(self, peer: str, message: PoolUnreachable) -> None:
        """Note that a peer cannot write to our pool."""
        if message.agent == self._peers.agent_for(peer):
            self._waiting[peer] = message.agent
            self._transfers.renew(message.agent)

    def on_renewed(self, event: TargetRenewed) -> None:
        """Introduce a new end to the peers that wait for it."""
        waiting = [peer for peer, failed in self._waiting.items() if failed == event.failed]
        former = self._peers.descriptor
        digest = authenticate_descriptor(
            self._secret, event.agent, event.descriptor, former.num_blocks, former.layout
        )
        descriptor = msgspec.structs.replace(
            former, agent=event.agent, descriptor=event.descriptor, digest=digest
        )
        for peer in waiting:
            del self._waiting[peer]
            log.warning(
                "%s cannot write to our pool as %s: it gets another end", peer, event.failed
            )
            self._peers.introduce(peer, descriptor)
            self._former.add(event.failed)
        self.retire_unused()

    def retire_unused(self) -> None:
        """Retire the former ends that no peer knows any more."""
        for agent in self._former - self._peers.agents:
            self._former.remove(agent)
            self._transfers.retire(agent)
