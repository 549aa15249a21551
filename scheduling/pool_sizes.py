"""How many large pages and blocks a pool has: arithmetic on its layout and its memory. Pure."""

from __future__ import annotations

from protocol.errors import ConfigError
from protocol.layout import KvLayout

LEAST_STATES = 4  # slots that one prompt holds


def pages_of(layout: KvLayout, num_blocks: int) -> int:
    """Number of large pages in the memory of `num_blocks` blocks over all layers, the same on all
    ranks. Raises ConfigError if it is too small for a page of each group, or the states of a
    sequence."""
    if not layout.grouping:
        return num_blocks
    sizes = [(each.block_bytes, each.page_bytes) for each in layout.ranks]
    num_pages = min(num_blocks * block_bytes // page_bytes for block_bytes, page_bytes in sizes)
    least = sum(1 if each.state_numbers is None else LEAST_STATES for each in layout.groups)
    if num_pages < least:
        raise ConfigError(
            f"the KV pool needs at least {_blocks_of(layout, least)} blocks, not {num_blocks}: "
            f"{least} large pages for the groups of layers"
        )
    return num_pages


def blocks_with(layout: KvLayout, num_blocks: int) -> int:
    """Number of blocks over all layers whose memory has blocks with these numbers in each group."""
    if not layout.grouping:
        return num_blocks
    fewest = min(layout.blocks_per_page(index) for index in range(len(layout.groups)))
    return _blocks_of(layout, max(len(layout.groups), -(-num_blocks // fewest)))


def _blocks_of(layout: KvLayout, num_pages: int) -> int:
    """Number of blocks over all layers whose memory has so many large pages on each rank."""
    return max(-(-num_pages * each.page_bytes // each.block_bytes) for each in layout.ranks)
