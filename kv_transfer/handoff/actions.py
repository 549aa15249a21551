"""The actions that the two state machines of a handoff ask of their owners.

Pure data. `kv_transfer.handoff.source` returns a `SourceAction` for each step at the source,
`kv_transfer.handoff.sink` a `SinkAction` for each at the sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.handoff.key import HandoffKey
from protocol.handoff_messages import FetchShortfall, KvAsk, KvFetch, KvGrant, KvRenew, KvWritten


@dataclass(frozen=True)
class PostWrite:
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
        """The notification that follows the data: one digest per block if checked, our rank."""
        return KvWritten(
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            part=self.key.part,
            group=self.group,
            first_block=self.first_block,
            num_blocks=len(self.source_blocks),
            digests=list(digests),
        )


@dataclass(frozen=True)
class SendBegun:
    """Send KvBegun to the sink that owns `agent`. It may be a repetition."""

    key: HandoffKey
    agent: str


@dataclass(frozen=True)
class Lookup:
    """Look up the hashes of a fetch, pin the blocks to serve, and answer with `found` at once."""

    fetch: KvFetch


@dataclass(frozen=True)
class Close:
    """Send KvClosed with this error ("" for none) to the sink that owns `agent`. `num_blocks` and
    `why` are those of a fetch."""

    key: HandoffKey
    agent: str
    error: str
    num_blocks: int = 0
    why: FetchShortfall | None = None


@dataclass(frozen=True)
class Release:
    """The handoff no longer needs its source blocks: unpin them."""

    key: HandoffKey


SourceAction = PostWrite | SendBegun | Lookup | Close | Release


@dataclass(frozen=True)
class SendAsk:
    """Send this to the source `peer`."""

    peer: str
    ask: KvAsk


@dataclass(frozen=True)
class Begun:
    """The source holds every block of the prompt: reserve and offer blocks."""

    key: HandoffKey


@dataclass(frozen=True)
class SendGrant:
    """Send this to the source `peer`."""

    peer: str
    grant: KvGrant


@dataclass(frozen=True)
class SendFetch:
    """Send this to the source `peer`."""

    peer: str
    fetch: KvFetch


@dataclass(frozen=True)
class SendRenew:
    """Send this to the source `peer`."""

    peer: str
    renew: KvRenew


@dataclass(frozen=True)
class SendAbort:
    """Ask the source `peer` to stop and to answer with KvClosed."""

    key: HandoffKey
    peer: str


@dataclass(frozen=True)
class Verify:
    """Every block has arrived: compare the digests of this group's and answer with `verified`."""

    key: HandoffKey
    blocks: tuple[int, ...]
    digests: tuple[bytes, ...]
    group: int = 0


@dataclass(frozen=True)
class Complete:
    """Every granted block holds its data."""

    key: HandoffKey


@dataclass(frozen=True)
class Fetched:
    """The fetch is over: the first `num_blocks` granted blocks hold their data."""

    key: HandoffKey
    num_blocks: int


@dataclass(frozen=True)
class Failed:
    """The attempt, or the fetch, has failed. `arrived`: prompt indices of the first group's granted
    blocks that hold their data."""

    key: HandoffKey
    reason: str
    arrived: tuple[int, ...]


@dataclass(frozen=True)
class Unfence:
    """No peer can write to these blocks any more, by group: the handoff releases them."""

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
