"""A KV layout for tests to which only the size of its blocks is not all the same."""

from __future__ import annotations

from protocol.layout import KvLayout


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
