"""A KV layout for tests to which only the size of its blocks is not all the same."""

from __future__ import annotations

import msgspec

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
    return msgspec.structs.replace(bare_layout(block_size), grouping=groups)
