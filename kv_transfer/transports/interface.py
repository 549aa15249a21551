"""The interface of a transport and the events that it reports.

A transport writes blocks of this process's pool into blocks of a peer's pool and delivers a
notification after the data. One thread calls all its methods except the constructor. Transports
know no handoffs: their caller decides who may write where, and when.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from kv_transfer.head_slices import Share, whole_shares
from kv_transfer.transports.memory_file import SharedMemory
from protocol.errors import PoolMismatch, TransferError

_P = TypeVar("_P")


@dataclass(frozen=True)
class PoolPart:
    """One rank's part of a pool: contiguous parts of blocks, `block_bytes` each, from `address`.
    `by_group` are the bytes of a block of each group of layers, if there are several."""

    address: int
    block_bytes: int
    device: str  # "cpu", or "cuda:N"
    by_group: tuple[int, ...] = ()

    def of_group(self, index: int) -> PoolPart:
        """The part as blocks of one group."""
        return replace(self, block_bytes=self.by_group[index], by_group=())


@dataclass(frozen=True)
class PoolMemory:
    """One pool of KV blocks: `num_blocks` contiguous blocks of `block_bytes` from `address`.

    If several ranks share the pool, this is rank 0's part of each block; `others` are the other
    ranks' parts, in the order of ranks. If blocks of several groups of layers lie in the pool,
    `views` has for each group rank 0's bytes of a block and the number of blocks, all over the same
    memory. The first group is included.
    """

    address: int
    block_bytes: int
    num_blocks: int
    device: str  # "cpu", or "cuda:N"
    others: tuple[PoolPart, ...] = ()
    views: tuple[tuple[int, int], ...] = ()

    @property
    def groups(self) -> tuple[PoolMemory, ...]:
        """The pool as blocks of each group."""
        if not self.views:
            return (self,)
        return tuple(
            replace(
                self,
                block_bytes=size,
                num_blocks=num_blocks,
                others=tuple(part.of_group(index) for part in self.others),
                views=(),
            )
            for index, (size, num_blocks) in enumerate(self.views)
        )

    @property
    def is_sound(self) -> bool:
        """Whether the blocks of all groups fill the same memory on each rank."""
        if any(len(part.by_group) != len(self.views) for part in self.others):
            return False
        sizes = [self.shape, *(each.shape for each in self.groups)]
        if min(min(each.num_blocks, *each.block_bytes) for each in sizes) <= 0:
            return False
        filled = {tuple(size * each.num_blocks for size in each.block_bytes) for each in sizes}
        return len(filled) == 1 and self.views[:1] in ((), ((self.block_bytes, self.num_blocks),))

    @property
    def parts(self) -> tuple[PoolPart, ...]:
        """Each rank's part, in the order of ranks."""
        return (PoolPart(self.address, self.block_bytes, self.device), *self.others)

    @property
    def shape(self) -> PoolShape:
        """The sizes of all parts."""
        return PoolShape(self.num_blocks, tuple(part.block_bytes for part in self.parts))


@dataclass(frozen=True)
class WriteDone:
    """A write is over: its source is no longer read and its target no longer written.

    If `error` is None, its data and then its notification arrive in this order; otherwise any
    part of the data may have landed.
    """

    handle: int
    error: str | None


@dataclass(frozen=True)
class Notification:
    """A peer's write has landed; `agent` names the peer, `payload` is the attached data."""

    agent: str
    payload: bytes


@dataclass(frozen=True)
class PeerReady:
    """A peer that was added now accepts writes."""

    agent: str


@dataclass(frozen=True)
class PeerLost:
    """A peer that was added cannot be written to and has been removed."""

    agent: str
    reason: str


TransportEvent = WriteDone | Notification | PeerReady | PeerLost


SharesByGroup = Sequence[tuple[Share, ...]]
"""The shares of the blocks of each group of layers, as `plan_shares` gives them."""


class Transport(Protocol):
    """Writes blocks into the pools of peers. One thread calls everything."""

    @property
    def name(self) -> str:
        """Name of the transport, as in the configuration."""

    @property
    def agent(self) -> str:
        """The name of this end, new for every incarnation."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that data may take to peers, by names for operators, best first; empty if the
        transport's name already says it."""

    def allocate(self, num_bytes: int) -> SharedMemory | None:
        """Zeroed memory in which the pool must live, and which the transport owns; None if any
        memory will do.

        Raises ConfigError if the host has not enough memory.
        """

    def register(self, pool: PoolMemory) -> None:
        """Make the pool readable and writable by this transport; call it once.

        Raises ConfigError for a device that the transport cannot serve, TransferError otherwise.
        """

    def descriptor(self) -> bytes:
        """The descriptor for a peer's `add_peer`; it must be authenticated on the way."""

    def add_peer(
        self, agent: str, descriptor: bytes, num_blocks: int, shares: SharesByGroup = ()
    ) -> None:
        """Connect to a peer's pool, which has `num_blocks` blocks of the first group: `poll`
        reports PeerReady or PeerLost. A former peer of this name is removed. Raises TransferError,
        PoolMismatch if the descriptor does not fit, and then leaves no peer behind.

        With `shares` a write copies these pieces of each block of a group straight into place and
        leaves the rest of the peer's block alone. Without `shares`, blocks have the same parts and
        sizes on both sides and are copied whole.
        """

    def remove_peer(self, agent: str) -> None:
        """Forget a peer, if it is known. `poll` reports its outstanding writes as failed."""

    def post_write(
        self,
        agent: str,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        notification: bytes,
        group: int = 0,
        post_before: float = math.inf,
    ) -> int:
        """Start copying own blocks of a group into the pool of a peer that is ready, pairwise;
        `poll` reports the returned handle, which no other write of this end has. A transport that
        posts later than in this call does so before `post_before`, of `time.monotonic`, or never.

        Raises PoolMismatch if the blocks lie outside of the pools: nothing was written. Raises
        TransferError otherwise: the write is over, and the peer should be removed and added again.
        """

    def poll(self) -> list[TransportEvent]:
        """Make progress without blocking; return the events since the last call."""

    def expect(self, data: bool) -> None:
        """Note whether peers are about to write here. The caller polls more often while they are,
        and so does each end that has a thread of its own."""

    def disconnect(self, kept: Collection[str]) -> int:
        """Break the connections over which peers on other machines may write here, except those
        with the addresses in `kept`: a stopped peer's unfinished writes then do not land when it
        continues. Peers that are alive must add us again. Any thread may call this, before `close`.
        Returns the number of connections of this process that are broken. Ends in other processes
        follow without being waited for: see `is_disconnecting`."""

    @property
    def is_disconnecting(self) -> bool:
        """Whether an end in another process may still have a connection that `disconnect` is to
        break. Any thread may read this."""

    def renew(self, failed: str) -> bool:
        """Peers cannot write to the end `failed`, an earlier value of `agent`. Let `agent` and
        `descriptor` name another end from now on. Returns False if there is no other end."""

    def retire(self, agent: str) -> None:
        """Note that no peer writes to a former end any more."""

    def close(self) -> None:
        """Release all resources. Peers must have stopped writing. A second call does nothing."""


def runs(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Join pairs of blocks that are adjacent on both sides: (source, target, number of blocks)."""
    start = 0
    for i in range(1, len(source) + 1):
        joined = (
            i < len(source) and source[i] == source[i - 1] + 1 and target[i] == target[i - 1] + 1
        )
        if not joined:
            yield source[start], target[start], i - start
            start = i


@dataclass(frozen=True)
class PoolShape:
    """The shape of a pool, as blocks of one group: its blocks, and the bytes of a block on each
    rank."""

    num_blocks: int
    block_bytes: tuple[int, ...]

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.block_bytes))
        return f"{self.num_blocks} blocks of {sizes} bytes on {len(self.block_bytes)} ranks"


def fit_groups(
    agent: str,
    found: Sequence[PoolShape],
    num_blocks: int,
    own: PoolMemory,
    shares: SharesByGroup,
) -> list[tuple[Share, ...]]:
    """The shares to copy, by group, to a peer whose pool is `found`: `shares`, or whole blocks if
    it is None.

    Raises PoolMismatch if `found` or our pool does not match `num_blocks` and the shares.
    """
    groups = own.groups
    fitting = shares or [whole_shares(each.shape.block_bytes) for each in groups]
    if not len(found) == len(groups) == len(fitting):
        raise PoolMismatch(
            f"peer {agent} has blocks of {len(found)} groups of layers, expected {len(groups)}"
        )
    named = [max(share.target + 1, share.num_targets) for each in fitting for share in each]
    num_ranks = max(named, default=len(found[0].block_bytes))
    num_bytes = num_blocks * found[0].block_bytes[0]
    for shape, ours, each in zip(found, groups, fitting, strict=True):
        _check_own(ours.shape, each)
        expected = _expected(shape, num_bytes // shape.block_bytes[0], num_ranks, each)
        if shape != expected:
            raise PoolMismatch(f"peer {agent} has {shape}, expected {expected}")
    return list(fitting)


def _check_own(own: PoolShape, shares: Sequence[Share]) -> None:
    ours = own.block_bytes
    for share in shares:
        size = share.slices.source.block_bytes
        if share.source >= len(ours) or size != ours[share.source]:
            raise PoolMismatch(
                f"slices of blocks of {size} bytes on rank {share.source} do not fit our pool: "
                f"{own}"
            )


def _expected(
    found: PoolShape, num_blocks: int, num_ranks: int, shares: Sequence[Share]
) -> PoolShape:
    """The shape that a peer's pool must have for these shares. For ranks that have no layer of the
    group, any shape will do."""
    sizes = dict(enumerate(found.block_bytes))
    sizes |= {share.target: share.slices.target.block_bytes for share in shares}
    return PoolShape(num_blocks, tuple(sizes.get(rank, 0) for rank in range(num_ranks)))


def known(peers: Mapping[str, _P], agent: str) -> _P:
    """The peer of this name. Raises TransferError."""
    found = peers.get(agent)
    if found is None:
        raise TransferError(f"peer {agent} is not known")
    return found


def check_blocks(
    source: Sequence[int], target: Sequence[int], num_source: int, num_target: int
) -> None:
    """Raises PoolMismatch if the lists are empty or differ in length, or a block lies outside its
    pool."""
    if not source or len(source) != len(target):
        raise PoolMismatch(f"{len(source)} source blocks for {len(target)} target blocks")
    for what, blocks, limit in (("source", source, num_source), ("target", target, num_target)):
        if min(blocks) < 0 or max(blocks) >= limit:
            raise PoolMismatch(f"a {what} block is outside of a pool of {limit} blocks")
