"""One handoff or fetch at its source: the blocks to write, and what is known of the sink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.handoff.actions import PostWrite
from kv_transfer.handoff.key import HandoffKey
from kv_transfer.handoff.states import SourceState
from protocol.handoff_messages import FetchShortfall, KvFetch


@dataclass
class Outgoing:
    """Changed by `HandoffSource` only. A fetch is served from `source_first` on, all at once."""

    state: SourceState
    deadline: float = 0.0  # for the prompt after an early ask, or for the grant after the prompt
    # the prompt, once it is open
    num_blocks: int | None = None
    source_first: int = 0  # the index in the prompt of the first of these
    source_blocks: list[int] = field(default_factory=list)  # prompt blocks ready so far
    chunks: list[int] = field(default_factory=list)  # the chunk that completed each of them
    prompt: bytes = b""  # digest of its tokens; "" matches any
    has_begun: bool = False
    ask_by: float = float("inf")
    is_finished: bool = False
    # the ask and then the grant, once there is one
    agent: str | None = None
    asked_prompt: bytes = b""  # the digest that the sink expects
    expires: float = 0.0
    first_block: int = 0
    target_blocks: Sequence[int] = ()
    # the writes
    next_block: int = 0  # first prompt block not posted yet
    outstanding: set[int] = field(default_factory=set)
    error: str = ""
    why: FetchShortfall | None = None  # of a fetch that is not served whole

    @classmethod
    def of_fetch(
        cls, fetch: KvFetch, blocks: Sequence[int], why: FetchShortfall | None, now: float
    ) -> Outgoing:
        """A fetch, for the first of whose hashes we have these blocks."""
        first = fetch.first_block
        return cls(
            SourceState.SENDING,
            num_blocks=first + len(blocks),
            source_first=first,
            source_blocks=list(blocks),
            chunks=[-1] * len(blocks),
            has_begun=True,
            is_finished=True,
            agent=fetch.agent,
            expires=now + fetch.ttl_ms / 1000,
            first_block=first,
            next_block=first,
            target_blocks=tuple(fetch.block_ids[: len(blocks)]),
            why=why,
        )

    @property
    def is_asked_for_another(self) -> bool:
        """Whether the sink asked for another prompt than this one."""
        return bool(self.prompt and self.asked_prompt) and self.prompt != self.asked_prompt

    @property
    def end_block(self) -> int:
        """The index in the prompt behind the last granted block."""
        return self.first_block + len(self.target_blocks)

    @property
    def num_posted(self) -> int:
        """Granted blocks of which a write was posted, the first ones."""
        return self.next_block - self.first_block

    @property
    def ready_end(self) -> int:
        """The index in the prompt behind the last block that is ready and granted."""
        return min(self.source_first + len(self.source_blocks), self.end_block)

    def write(self, write_id: int, key: HandoffKey, upto: int, margin_s: float) -> PostWrite:
        """The write of the blocks that were not posted yet, up to this index in the prompt."""
        assert self.agent is not None
        first = self.next_block
        source = slice(first - self.source_first, upto - self.source_first)
        target = slice(first - self.first_block, upto - self.first_block)
        self.next_block = upto
        self.outstanding.add(write_id)
        return PostWrite(
            write_id=write_id,
            key=key,
            agent=self.agent,
            source_blocks=tuple(self.source_blocks[source]),
            target_blocks=tuple(self.target_blocks[target]),
            first_block=first,
            chunk=self.chunks[upto - 1 - self.source_first],
            post_before=self.expires - margin_s,
        )
