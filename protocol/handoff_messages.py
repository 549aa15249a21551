"""Messages between the two workers of a handoff or fetch, and about caches of workers that drain.

The sink asks and grants; the source answers and writes. Asks, grants, renewals and aborts (Abort is
in `protocol.messages`, as routers send it, too) go over the sink's control link, KvWritten through
the transport, behind its data.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.field_bounds import (
    MAX_TOKENS,
    Blob,
    Count,
    Dimension,
    Hash,
    Hashes,
    Reason,
    RequestId,
    Text,
    TtlMs,
)
from protocol.layout import KvLayout
from protocol.message_base import Message
from protocol.messages import SampledToken

Blocks = Annotated[list[Dimension], Meta(max_length=MAX_TOKENS)]
MAX_GROUPS = 64
"""Groups of layers in any layout."""


class FetchShortfall(StrEnum):
    """Why a source did not write all blocks of a fetch."""

    EVICTED = "evicted"  # its cache no longer has the next one
    BUSY = "busy"  # peers already read as much of its pool as it allows
    STOPPING = "stopping"  # it serves no more fetches


class GroupBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one group of layers, one for each block of the prompt from `first_block` on."""

    group: Dimension
    first_block: Count
    block_ids: Blocks

    @property
    def end_block(self) -> int:
        """The index in the prompt behind the last of them."""
        return self.first_block + len(self.block_ids)


Groups = Annotated[list[GroupBlocks], Meta(max_length=MAX_GROUPS)]


# -- handoffs and fetches --------------------------------------------------------------------


class PeerDescriptor(Message, frozen=True, kw_only=True):
    """Sink to source, after Hello: how to reach my pool by this transport.

    `descriptor` is in the transport's own format; `digest` authenticates it (keyed BLAKE2b).
    `layout`, of rank 0, is set unless one rank has whole blocks layer by layer. It says which heads
    each rank gets, and where in its part of a block they lie. With `wants_digests`, notifications
    of writes into this pool carry one digest per block.
    """

    transport: Text
    agent: Text
    descriptor: Blob
    digest: Hash
    num_blocks: Dimension
    layout: KvLayout | None = None
    wants_digests: bool = False


class KvAsk(Message, frozen=True, kw_only=True):
    """Sink to source: tell me when you hold every block of this attempt's prompt.

    The ask is valid for `ttl_ms` from receipt; a repeated one renews it. KvBegun answers as soon as
    the source holds the blocks. Nothing is granted yet. `prompt` is the digest of the prompt's
    tokens: the source closes a handoff whose prompt has another one.
    """

    request_id: RequestId
    attempt: Count
    agent: Text
    ttl_ms: TtlMs
    prompt: Hash = b""


class KvBegun(Message, frozen=True, kw_only=True):
    """Source to sink: I hold every block of this attempt's prompt and keep them until the handoff
    closes. Only now may the sink reserve blocks for it."""

    request_id: RequestId
    attempt: Count


class KvGrant(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Sink to source: the right to write these blocks for `ttl_ms` from receipt.

    `first_block` is the index, in the prompt, of the block that `block_ids[0]` receives; the
    others follow in order. The sink already has the blocks before it. These are blocks of the
    layout's first group; `others` are those of the other groups, each once, in their order.
    """

    request_id: RequestId
    attempt: Count
    agent: Text
    first_block: Count
    block_ids: Blocks
    others: Groups = msgspec.field(default_factory=list)
    ttl_ms: TtlMs

    @property
    def groups(self) -> list[GroupBlocks]:
        """The blocks of every group."""
        first = GroupBlocks(group=0, first_block=self.first_block, block_ids=self.block_ids)
        return [first, *self.others]


class KvFetch(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Sink to source: write the blocks of your cache that have these `hashes` into my blocks.

    This is a grant, as KvGrant, of blocks that the sink already owns. The source writes the longest
    unbroken run that it has now, from the first hash on, and closes. `part` counts the fetches of
    an attempt from 1; part 0 is its handoff. `first_block` is the index in the prompt of the first
    hash.

    The blocks are those of the first group. The other groups keep windows: `others` are slots for
    each, with `first_block` 0. Of a run of n blocks, a group with w slots gets the last min(w, n):
    slot j gets block n - min(w, n) + j of the run. The source looks for the longest run for which
    it has all of these, and writes all or nothing. The sink already has the blocks before the run
    that the windows reach.
    """

    request_id: RequestId
    attempt: Count
    part: Dimension
    agent: Text
    first_block: Count
    hashes: Hashes
    block_ids: Blocks
    others: Groups = msgspec.field(default_factory=list)
    ttl_ms: TtlMs


class KvRenew(Message, frozen=True, kw_only=True):
    """Sink to source: the grant is now valid for `ttl_ms` from receipt."""

    request_id: RequestId
    attempt: Count
    part: Dimension = 0
    ttl_ms: TtlMs


class HandoffToken(SampledToken, frozen=True, kw_only=True):
    """Source to sink: the first token. `cached_tokens` counts the prompt's tokens that the attempt
    with the output's first token found in caches."""

    cached_tokens: Count
    last_chunk_end_us: Count


class KvClosed(Message, frozen=True, kw_only=True):
    """Source to sink: nothing more will be written for this handoff or fetch.

    `error` is empty after completion or a requested abort. `code` is that of AttemptFailed.

    A fetch without error has written exactly the first `num_blocks` granted blocks, in `write_us`.
    If there are any, it has also written the slots of the other groups. `why` is the reason for
    missing blocks; None if no block is missing or the sink asked to stop.
    """

    request_id: RequestId
    attempt: Count
    part: Dimension = 0
    error: Reason = ""
    code: Text = ""
    num_blocks: Dimension = 0
    why: FetchShortfall | None = None
    write_us: Count = 0


class PoolUnreachable(Message, frozen=True, kw_only=True):
    """Source to sink: I cannot write to your pool under the name `agent`, and connecting again did
    not help. A sink that can open another agent answers with the PeerDescriptor of that agent."""

    agent: Text


class PoolRefused(Message, frozen=True, kw_only=True):
    """Source to sink: I will never write to the pool that you introduced as `agent`."""

    agent: Text
    reason: Reason


class KvWritten(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Notification of a transport, arriving after its data: these blocks are in place.

    `first_block` is the index in the prompt of the first of `num_blocks` blocks of `group`.
    `digests` is empty unless the reader's descriptor wants digests: then it holds one digest per
    block.
    """

    request_id: RequestId
    attempt: Count
    part: Dimension = 0
    group: Dimension = 0
    first_block: Count
    num_blocks: Dimension
    digests: Hashes = msgspec.field(default_factory=list)


# -- the cache of a worker that drains ----------------------------------------------------------


class CacheOffer(Message, frozen=True, kw_only=True):
    """A worker that drains to one that stays: I have cached blocks of idle conversations. Ask for
    them with CacheAsk."""


class CacheAsk(Message, frozen=True, kw_only=True):
    """The answer to a CacheOffer, and to each CachedPrefix: name the next prefix of your cache. I
    have room for `num_blocks` blocks; at 0 I want no more."""

    num_blocks: Dimension


class CachedPrefix(Message, frozen=True, kw_only=True):
    """The answer to a CacheAsk: the hashes of a prefix in my cache, from a prompt's first block on.
    No other worker is offered this prefix. KvFetch gets the blocks. An empty list means that there
    are no more prefixes. With `stays_in_pool`, some of its blocks may be kept in pools only."""

    hashes: Hashes
    stays_in_pool: bool = False
