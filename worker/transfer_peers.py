"""The pools of other workers that this worker may write to, and the digests of its own blocks.

A sink introduces its pool with a descriptor, which is verified before the transport sees it. Owns
the verified descriptors, by agent.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.kv_pool import KvPool
from kv_transfer.authentication import verify_descriptor
from kv_transfer.head_slices import num_pieces, plan_shares
from kv_transfer.service import TransferService
from kv_transfer.transports.interface import SharesByGroup
from protocol.errors import ConfigError, ProtocolError
from protocol.handoff_messages import PeerDescriptor
from protocol.layout import KvLayout
from worker.counters import Count, Counters

log = logging.getLogger(__name__)


class TransferPeers:
    """The peers of our transport; belongs to the loop's thread."""

    def __init__(
        self, transfers: TransferService, pool: KvPool, secret: bytes, counters: Counters
    ) -> None:
        self._transfers = transfers
        self._pool = pool
        self._secret = secret
        self._counters = counters
        self._descriptors: dict[str, tuple[PeerDescriptor, SharesByGroup]] = {}  # verified
        self._added: set[str] = set()  # agents that the transport knows

    def add(self, message: PeerDescriptor) -> None:
        """Make a peer's pool writable. Raises ConfigError or ProtocolError if its descriptor is not
        authentic, for another transport or of another cache; such a refusal is counted."""
        try:
            if message.transport != self._transfers.transport_name:
                raise ProtocolError(
                    f"transport differs: ours is {self._transfers.transport_name}, "
                    f"the peer's is {message.transport}"
                )
            verify_descriptor(
                self._secret,
                message.agent,
                message.descriptor,
                message.num_blocks,
                message.digest,
                message.layout,
            )
            own = self._pool.layout
            if message.wants_digests and not self._pool.has_all_ranks:
                raise ProtocolError(
                    "it compares digests of whole blocks (kv_checksum), and no process of this "
                    "worker has whole blocks"
                )
            theirs = own.unsharded if message.layout is None else message.layout
            shares = plan_shares(own, theirs)
        except (ConfigError, ProtocolError) as error:
            log.warning("refused the pool of agent %s: %s", message.agent, error)
            self._counters.add(Count.DESCRIPTORS_REFUSED)
            raise
        if message.transport == "nixl":  # shared memory is copied as fast in small pieces
            _warn_of_small_pieces(message.agent, shares, own, theirs)
        self._descriptors[message.agent] = message, shares
        self.restore(message.agent)

    def restore(self, agent: str) -> None:
        """Add a verified peer to the transport, unless the transport has it."""
        if agent not in self._added:
            message, shares = self._descriptors[agent]
            self._added.add(agent)
            self._transfers.add_peer(agent, message.descriptor, message.num_blocks, shares)

    def wants_digests(self, agent: str) -> bool:
        """Whether a verified peer compares digests of the blocks that it gets."""
        found = self._descriptors.get(agent)
        return found is not None and found[0].wants_digests

    def note_dropped(self, agent: str) -> None:
        """Note that the transport has dropped this peer after a failure; `restore` may follow."""
        self._added.discard(agent)

    def remove(self, agent: str) -> None:
        """Remove a peer that is gone. Outstanding writes to the peer fail; a new descriptor adds
        the peer again."""
        self._descriptors.pop(agent, None)
        self._added.discard(agent)
        self._transfers.remove_peer(agent)

    def digests(self, blocks: Sequence[int], group: int = 0) -> list[bytes]:
        """One digest per block of a group in our pool."""
        pool = self._pool.groups[group]
        return [pool.digest(block) for block in blocks]


def _warn_of_small_pieces(
    agent: str, shares: SharesByGroup, own: KvLayout, theirs: KvLayout
) -> None:
    """Warn if one of the two workers orders its blocks for other ranks than the other worker
    has."""
    most = max((count for each in shares for count in num_pieces(each).values()), default=1)
    if most == 1:
        return
    sides = (("this worker", own, theirs), (f"agent {agent}", theirs, own))
    advice = [
        f"{who} with peer_tensor_parallel {peer.tp_size} and peer_pipeline_parallel "
        f"{peer.num_stages}"
        for who, layout, peer in sides
        if layout.peer_stages != (peer.num_stages if peer.tp_size != layout.tp_size else 0)
    ]
    log.warning(
        "each KV block goes to agent %s in %d pieces for each pair of ranks, which is slow: "
        "start %s",
        agent,
        most,
        ", and ".join(advice),
    )
