"""What attention is tested over: shapes of pools and heads, and texts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import msgspec
from hypothesis import strategies as st

from engine.attention.cpu_backend import order_for
from protocol.layout import TOKENS, KvLayout

NUM_LAYERS = 2


@dataclass(frozen=True)
class Shape:
    """Of a pool and the heads over it."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: str = "float32"
    windows: tuple[int | None, int | None] = (None, None)
    may_pair: bool = True
    """Whether the kernel's pool has the order of its products, where it can."""

    def layout(self, library: ctypes.CDLL) -> KvLayout:
        """Of the kernel's pool."""
        layout = KvLayout(
            model_fingerprint="x",
            dtype=self.dtype,
            num_layers=NUM_LAYERS,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            head_dim=self.head_dim,
        )
        order = order_for(layout, library) if self.may_pair else TOKENS
        return msgspec.structs.replace(layout, order=order)


def num_tokens(texts: list[tuple[int, int]]) -> int:
    """Of texts of (tokens before, tokens now)."""
    return sum(before + now for before, now in texts)


shapes = st.builds(
    lambda heads, **rest: Shape(*heads, **rest),
    st.sampled_from([(4, 4), (4, 2), (6, 1), (3, 3), (14, 2), (12, 4)]),
    head_dim=st.sampled_from([2, 8, 16, 40, 64, 80, 128, 160]),
    block_size=st.sampled_from([1, 4, 16, 48, 100]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    windows=st.sampled_from([(None, None), (5, None), (1, 17), (70, 200)]),
    may_pair=st.booleans(),
)
