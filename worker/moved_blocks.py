"""The blocks of a sequence that a handoff moves, by group of layers, and the windows that groups
keep."""

from __future__ import annotations

from protocol.handoff_messages import GroupBlocks
from protocol.layout import KvLayout
from protocol.registration import KeptWindow
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence


def moved_blocks(
    sequence: Sequence, group: int, num_tokens: int, first_block: int = 0
) -> GroupBlocks:
    """The blocks of a group that hold the first `num_tokens` tokens, from `first_block` on, or from
    the first one on that the group keeps."""
    table = sequence.tables[group]
    first = max(first_block, table.first)
    end = max(first, sequence.blocks_for(num_tokens))
    blocks = table.blocks[first - table.first : end - table.first]
    return GroupBlocks(group=group, first_block=first, block_ids=blocks)


def bytes_by_group(layout: KvLayout) -> list[int]:
    """Bytes of a block of each group, on all ranks."""
    return [layout.of_group(group).worker_block_bytes for group in range(len(layout.groups))]


def kept_windows(scheduler: Scheduler, layout: KvLayout) -> tuple[KeptWindow, ...]:
    """The windows that all groups except the first keep; empty if the first group has a window,
    too."""
    rules, sizes = scheduler.pools.rules, bytes_by_group(layout)
    if rules[0].window is not None:
        return ()
    chunk, every = scheduler.config.chunk_max_tokens, 1 << 30
    return tuple(
        KeptWindow(size / sizes[0], rule.held(every, chunk), rule.cover)
        for rule, size in zip(rules[1:], sizes[1:], strict=True)
    )
