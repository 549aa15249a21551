"""One handoff or fetch at its source: the blocks to write, by group, and what the source knows
about the sink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kv_transfer.handoff.key import HandoffKey
from kv_transfer.handoff.states import SourceState
from protocol.handoff_messages import FetchShortfall, KvFetch, KvGrant

GroupedBlocks = Sequence[Sequence[int]]
"""Blocks of each group of layers, those of the first group first."""


class Piece(NamedTuple):
    """Blocks of one group to write at once; as in `PostWrite`."""

    group: int
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    first_block: int
    chunk: int


@dataclass(slots=True)
class OutgoingGroup:
    """The blocks of one group that are ready, and those that the sink granted."""

    source_first: int = 0  # the prompt index of the first one
    source_blocks: list[int] = field(default_factory=list)  # prompt blocks ready so far
    chunks: list[int] = field(default_factory=list)  # the chunk that completed each of them
    first_block: int = 0
    target_blocks: Sequence[int] = ()
    next_block: int = 0  # first prompt block not posted yet

    @property
    def source_end(self) -> int:
        """The prompt index after the last ready block."""
        return self.source_first + len(self.source_blocks)

    @property
    def end_block(self) -> int:
        """The prompt index after the last granted block."""
        return self.first_block + len(self.target_blocks)

    @property
    def lacks_next(self) -> bool:
        """Whether the sink wants a block that is no longer kept here."""
        is_wanted = self.next_block < self.end_block
        return is_wanted and bool(self.source_blocks) and self.next_block < self.source_first

    def grant(self, first_block: int, target_blocks: Sequence[int]) -> None:
        """Note that the sink grants these blocks."""
        self.first_block = self.next_block = first_block
        self.target_blocks = tuple(target_blocks)

    def add(self, blocks: Sequence[int], chunk: int) -> None:
        """Add ready blocks, which follow those that are ready already."""
        self.source_blocks += blocks
        self.chunks += [chunk] * len(blocks)

    def take(self, group: int, most: int) -> Piece | None:
        """The next blocks to write, at most `most`; None if no granted block is ready."""
        first = self.next_block
        upto = min(self.source_end, self.end_block, first + most)
        if not self.source_first <= first < upto:
            return None
        source = slice(first - self.source_first, upto - self.source_first)
        target = slice(first - self.first_block, upto - self.first_block)
        self.next_block = upto
        return Piece(
            group,
            tuple(self.source_blocks[source]),
            tuple(self.target_blocks[target]),
            first,
            self.chunks[upto - 1 - self.source_first],
        )


@dataclass(slots=True)
class Outgoing:
    """Changed by `HandoffSource` only. A fetch is served all at once."""

    state: SourceState
    groups: list[OutgoingGroup]
    # The time until which the prompt must follow an early ask, or the grant must follow the prompt.
    deadline: float = 0.0
    # length of the prompt, once it is open
    num_blocks: int | None = None
    prompt: bytes = b""  # digest of its tokens; "" matches any
    has_begun: bool = False
    ask_by: float = float("inf")
    is_finished: bool = False
    # when the ask, or later the grant, expires
    agent: str | None = None
    asked_prompt: bytes = b""  # the digest that the sink expects
    expires: float = 0.0
    # the writes
    outstanding: set[int] = field(default_factory=set)
    error: str = ""
    why: FetchShortfall | None = None  # of a fetch that is not served whole

    @classmethod
    def of_fetch(
        cls, fetch: KvFetch, blocks: GroupedBlocks, why: FetchShortfall | None, now: float
    ) -> Outgoing:
        """A fetch that gets these blocks, for the first of its hashes and for its slots."""
        grants = [(fetch.first_block, fetch.block_ids), *((0, g.block_ids) for g in fetch.others)]
        groups = []
        for (first, targets), ready in zip(grants, blocks, strict=True):
            group = OutgoingGroup(first, list(ready), [-1] * len(ready))
            group.grant(first, targets[: len(ready)])
            groups.append(group)
        return cls(
            SourceState.SENDING,
            groups,
            num_blocks=fetch.first_block + len(blocks[0]),
            has_begun=True,
            is_finished=True,
            agent=fetch.agent,
            expires=now + fetch.ttl_ms / 1000,
            why=why,
        )

    @property
    def is_asked_for_another(self) -> bool:
        """Whether the sink asked for another prompt than this one."""
        return bool(self.prompt and self.asked_prompt) and self.prompt != self.asked_prompt

    @property
    def is_posted(self) -> bool:
        """Whether a write of every granted block was posted."""
        return all(each.next_block >= each.end_block for each in self.groups)

    @property
    def num_posted(self) -> int:
        """The number of leading blocks of a fetch for which a write was posted. With several
        groups, it is 0 unless all writes were posted."""
        is_useless = len(self.groups) > 1 and not self.is_posted
        return 0 if is_useless else self.groups[0].next_block - self.groups[0].first_block

    def late_for(self, now: float) -> str:
        """What is late, in words; "" if nothing is."""
        is_late, is_expired = now >= self.deadline, now >= self.expires
        match self.state:
            case SourceState.WAITING if is_late or now >= self.ask_by:
                return "no sink asked for it"
            case SourceState.ASKED_EARLY if is_late:
                return "no prompt came in time"
            case SourceState.ASKED if is_late:
                return "no grant came in time"
            case SourceState.ASKED if is_expired:
                return "the sink asks no more"
            case SourceState.SENDING if is_expired:
                return "the grant expired"
        return ""

    def take_grant(self, grant: KvGrant, now: float) -> str:
        """Take the sink's blocks for each group. Returns what is wrong with them, "" if nothing
        is."""
        assert self.num_blocks is not None, "what is granted is open"
        self.expires = now + grant.ttl_ms / 1000
        granted = grant.groups
        if [each.group for each in granted] != list(range(len(self.groups))):
            return "the grant does not name each group once"
        for group, blocks in zip(self.groups, granted, strict=True):
            if blocks.first_block < 0 or _has_twins(blocks.block_ids):
                return "the grant is malformed"
            group.grant(blocks.first_block, blocks.block_ids)
            if group.end_block > self.num_blocks:
                return f"the grant ends at block {group.end_block}, the prompt at {self.num_blocks}"
        return ""

    def missing(self) -> str:
        """A granted block that this worker no longer keeps, in words; "" if there is none."""
        for number, group in enumerate(self.groups):
            if group.lacks_next:
                return f"block {group.next_block} of group {number} is no longer kept here"
        return ""

    def not_ready(self, key: HandoffKey) -> str:
        """The blocks that a finished prompt should have and that were not reported; "" if all
        were."""
        for group in self.groups:
            if group.source_end != self.num_blocks:
                return f"{group.source_end} blocks of {self.num_blocks} are ready for {key}"
        return ""


def is_whole(fetch: KvFetch, num_groups: int) -> bool:
    """Whether a fetch is well formed: a block for each hash, and slots for each other group."""
    is_even = len(fetch.block_ids) == len(fetch.hashes)
    named = [each.group for each in fetch.others] == list(range(1, num_groups))
    has_twins = any(map(_has_twins, [fetch.block_ids, *(g.block_ids for g in fetch.others)]))
    return fetch.part > 0 and fetch.first_block >= 0 and is_even and named and not has_twins


def _has_twins(block_ids: Sequence[int]) -> bool:
    return len(set(block_ids)) < len(block_ids)
