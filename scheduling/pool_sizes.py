"""How many large pages and blocks a pool has: arithmetic on its layout and its memory. Pure."""

from __future__ import annotations

from protocol.errors import ConfigError
from protocol.layout import KvLayout

LEAST_STATES = 4  # slots that one prompt holds


def pages_of(layout: KvLayout, num_blocks: int) -> int:
    """Number of large pages of a pool of `num_blocks` blocks over all layers, the same on all
    ranks. Raises ConfigError if it is too small for a page of each group, or the states of a
    sequence."""
    if not layout.grouping:
        return num_blocks
    whole = layout.unsharded
    num_pages = num_blocks * whole.block_bytes // whole.page_bytes
    least = sum(1 if each.state_numbers is None else LEAST_STATES for each in layout.groups)
    if num_pages < least:
        raise ConfigError(
            f"the KV pool needs at least {_blocks_of(layout, least)} blocks, not {num_blocks}: "
            f"{least} large pages for the groups of layers"
        )
    return num_pages


def pool_bytes(layout: KvLayout, num_blocks: int) -> int:
    """Bytes of this rank's part of a pool. Raises ConfigError as `pages_of`."""
    if not layout.grouping:
        return num_blocks * layout.block_bytes
    return pages_of(layout, num_blocks) * layout.page_bytes


def blocks_in(layout: KvLayout, num_bytes: int) -> int:
    """Number of blocks over all layers of a pool of which this rank's part has `num_bytes`."""
    if not layout.grouping:
        return num_bytes // layout.block_bytes
    whole = layout.unsharded
    return num_bytes // layout.page_bytes * whole.page_bytes // whole.block_bytes


def blocks_with(layout: KvLayout, num_blocks: int) -> int:
    """Number of blocks over all layers whose memory has blocks with these numbers in each group."""
    if not layout.grouping:
        return num_blocks
    fewest = min(layout.blocks_per_page(index) for index in range(len(layout.groups)))
    return _blocks_of(layout, max(len(layout.groups), -(-num_blocks // fewest)))


def _blocks_of(layout: KvLayout, num_pages: int) -> int:
    """Number of blocks over all layers of a pool with so many large pages."""
    whole = layout.unsharded
    return -(-num_pages * whole.page_bytes // whole.block_bytes)
