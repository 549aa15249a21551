"""Descriptors of sharded pools, and the head slices that one rank writes to another.

Only tests use this module. It is kept until workers of several cards replace it with the one
handoff. The descriptor of a sharded pool says which of the cache's heads the pool holds. These
heads determine where data goes, so the descriptor's digest covers them, and they are compared with
our own layout before a transport sees the descriptor.
"""

from __future__ import annotations

from kv_transfer.authentication import authenticate_descriptor, verify_descriptor
from kv_transfer.head_slices import HeadSlices, plan_head_slices
from protocol.errors import ConfigError, ProtocolError
from protocol.layout import KvLayout
from protocol.messages import PeerDescriptor


def describe_shard(
    secret: bytes, transport: str, agent: str, descriptor: bytes, pool: tuple[int, KvLayout]
) -> PeerDescriptor:
    """The authenticated descriptor of a rank's `pool`, given as (number of blocks, layout)."""
    num_blocks, layout = pool
    return PeerDescriptor(
        transport=transport,
        agent=agent,
        descriptor=descriptor,
        digest=authenticate_descriptor(secret, agent, descriptor, num_blocks, layout),
        num_blocks=num_blocks,
        layout=layout,
    )


def admit_shard(secret: bytes, own: KvLayout, transport: str, peer: PeerDescriptor) -> HeadSlices:
    """The pieces of each of our blocks that a write copies into the peer's.

    Raises ProtocolError unless the descriptor is authentic, is for our `transport`, and belongs to
    a rank of the same cache that shares heads with us.
    """
    if peer.transport != transport:
        raise ProtocolError(f"transport differs: ours is {transport}, the peer's {peer.transport}")
    verify_descriptor(
        secret, peer.agent, peer.descriptor, peer.num_blocks, peer.digest, peer.layout
    )
    if peer.layout is None:
        raise ProtocolError(f"agent {peer.agent!r} does not say which heads its pool holds")
    try:
        slices = plan_head_slices(own, peer.layout)
    except ConfigError as error:
        raise ProtocolError(str(error)) from error
    if slices is None:
        raise ProtocolError(f"agent {peer.agent!r} shares no head with our rank {own.tp_rank}")
    return slices
