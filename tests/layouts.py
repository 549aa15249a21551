"""KV layouts for tests to which only the size of their blocks matters, and blocks of any layout."""

from __future__ import annotations

import msgspec
import numpy as np

from protocol.block_order import cells
from protocol.layout import STATE_WINDOW, KvGroup, KvLayout


def bare_layout(block_size: int) -> KvLayout:
    """One layer, one head and one number."""
    return KvLayout(
        model_fingerprint="m",
        dtype="float32",
        num_layers=1,
        num_kv_heads=1,
        block_size=block_size,
        head_dim=1,
    )


def divisible_layout() -> KvLayout:
    """Two layers, four heads of four numbers: up to two stages of up to four ranks share them."""
    return KvLayout(
        model_fingerprint="m",
        dtype="float32",
        num_layers=2,
        num_kv_heads=4,
        block_size=2,
        head_dim=4,
    )


def windowed_layout(block_size: int, *windows: int) -> KvLayout:
    """A layer without a window, and two layers for each window."""
    groups = [KvGroup((0,))]
    for number, window in enumerate(windows):
        groups.append(KvGroup((2 * number + 1, 2 * number + 2), window))
    layout = bare_layout(block_size)
    num_layers = 1 + 2 * len(windows)
    return msgspec.structs.replace(layout, num_layers=num_layers, grouping=tuple(groups))


def state_layout(block_size: int, state_numbers: int) -> KvLayout:
    """A layer that keeps all tokens, and two layers with states of so many numbers."""
    groups = (KvGroup((0,)), KvGroup((1, 2), STATE_WINDOW, state_numbers))
    return msgspec.structs.replace(bare_layout(block_size), num_layers=3, grouping=groups)


def part_of(layout: KvLayout, blocks: np.ndarray) -> np.ndarray:
    """The part of whole `blocks` [blocks, layers, 2, heads, block_size, head_dim] that the rank
    holds, [blocks, numbers]."""
    own = blocks[:, :, :, layout.heads.start : layout.heads.stop]
    if not layout.peer_stages:
        return own[:, layout.layers.start : layout.layers.stop].reshape(len(blocks), -1)
    parts = [own[:, cell.start : cell.stop].transpose(0, 3, 1, 2, 4, 5) for cell in cells(layout)]
    return np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1)
