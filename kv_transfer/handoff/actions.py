"""The actions that the two state machines of a handoff ask of their owners.

Pure data. `kv_transfer.handoff.source` returns a `SourceAction` for each step at the source,
`kv_transfer.handoff.sink` a `SinkAction` for each at the sink.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kv_transfer.handoff.key import HandoffKey
from protocol.handoff_messages import FetchShortfall, KvAsk, KvFetch, KvGrant, KvRenew, KvWritten


class PostWrite(msgspec.Struct, frozen=True):
    """Write these blocks of `group`; `write_finished(write_id, ...)` must follow.

    `chunk` is the prefill chunk that completed the last block (-1: it was cached before). Post the
    write before `post_before`, the time when only the grant's margin is left.
    """

    write_id: int
    key: HandoffKey
    agent: str
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    first_block: int
    chunk: int
    post_before: float
    group: int = 0

    def notification(self, digests: Sequence[bytes] = ()) -> KvWritten:
        """The notification that follows the data. `digests` has one for each block, if the sink
        checks them."""
        return KvWritten(
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            part=self.key.part,
            group=self.group,
            first_block=self.first_block,
            num_blocks=len(self.source_blocks),
            digests=list(digests),
        )


class SendBegun(msgspec.Struct, frozen=True):
    """Send KvBegun to the sink that owns `agent`. It may be a repetition."""

    key: HandoffKey
    agent: str


class Lookup(msgspec.Struct, frozen=True):
    """Look up the hashes of a fetch, pin the blocks to serve, and answer with `found` at once."""

    fetch: KvFetch


class Close(msgspec.Struct, frozen=True):
    """Send KvClosed with this error ("" for none) to the sink that owns `agent`. `num_blocks` and
    `why` are those of a fetch."""

    key: HandoffKey
    agent: str
    error: str
    num_blocks: int = 0
    why: FetchShortfall | None = None


class Release(msgspec.Struct, frozen=True):
    """The handoff no longer needs its source blocks: unpin them."""

    key: HandoffKey


SourceAction = PostWrite | SendBegun | Lookup | Close | Release


class SendAsk(msgspec.Struct, frozen=True):
    """Send this to the source `peer`."""

    peer: str
    ask: KvAsk


class Begun(msgspec.Struct, frozen=True):
    """The source holds every block of the prompt. The owner reserves blocks and offers them."""

    key: HandoffKey


class SendGrant(msgspec.Struct, frozen=True):
    """Send this to the source `peer`."""

    peer: str
    grant: KvGrant


class SendFetch(msgspec.Struct, frozen=True):
    """Send this to the source `peer`."""

    peer: str
    fetch: KvFetch


class SendRenew(msgspec.Struct, frozen=True):
    """Send this to the source `peer`."""

    peer: str
    renew: KvRenew


class SendAbort(msgspec.Struct, frozen=True):
    """Ask the source `peer` to stop and to answer with KvClosed."""

    key: HandoffKey
    peer: str


class Verify(msgspec.Struct, frozen=True):
    """Every block has arrived. Compare the digests of this group's blocks, and answer with
    `verified`."""

    key: HandoffKey
    blocks: tuple[int, ...]
    digests: tuple[bytes, ...]
    group: int = 0


class Complete(msgspec.Struct, frozen=True):
    """Every granted block holds its data."""

    key: HandoffKey


class Fetched(msgspec.Struct, frozen=True):
    """The fetch is over: the first `num_blocks` granted blocks hold their data."""

    key: HandoffKey
    num_blocks: int


class Failed(msgspec.Struct, frozen=True):
    """The attempt, or the fetch, has failed. `arrived`: prompt indices of the first group's granted
    blocks that hold their data."""

    key: HandoffKey
    reason: str
    arrived: tuple[int, ...]


class Unfence(msgspec.Struct, frozen=True):
    """No peer can write to these blocks, by group, any more. The handoff releases them."""

    key: HandoffKey
    groups: tuple[tuple[int, ...], ...]


SinkAction = (
    SendAsk
    | Begun
    | SendGrant
    | SendFetch
    | SendRenew
    | SendAbort
    | Verify
    | Complete
    | Fetched
    | Failed
    | Unfence
)
