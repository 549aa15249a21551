"""What attention is tested over: shapes of pools and heads, and texts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st

from engine.attention.cpu_attention import orders_for
from engine.checkpoint.attention_config import Scoring
from protocol.layout import PAIRS, SPLIT, TOKENS, KvLayout

NUM_LAYERS = 2


@dataclass(frozen=True)
class Shape:
    """The shape of a pool and of the heads over it."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: str = "float32"
    windows: tuple[int | None, int | None] = (None, None)
    order: int = 0
    """Which of the orders of the kernel's pool, the fastest first; tokens are the last."""
    peer_stages: int = 0
    """How layers and heads lie in a block, unless it is split (`protocol.block_order`)."""
    scoring: Scoring | None = None
    has_sinks: bool = False

    def layout(self, library: ctypes.CDLL) -> KvLayout:
        """The layout of the kernel's pool."""
        layout = KvLayout(
            model_fingerprint="x",
            dtype=self.dtype,
            num_layers=NUM_LAYERS,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            head_dim=self.head_dim,
        )
        orders = orders_for(layout, library)
        order = orders[min(self.order, len(orders) - 1)]
        peer_stages = 0 if order == SPLIT else self.peer_stages
        return msgspec.structs.replace(layout, order=order, peer_stages=peer_stages)


def in_order(blocks: torch.Tensor, order: str) -> torch.Tensor:
    """`blocks` [..., 2, heads, block size, head dim] of tokens, in this order."""
    if order == TOKENS:
        return blocks
    *lead, _, heads, size, dim = blocks.shape
    groups, last = size // 16, len(lead) + 3
    keys, values = blocks.unbind(-4)
    keys = keys.reshape(*lead, heads, groups, 16, dim // 2, 2).transpose(last - 1, last)
    values = values.reshape(*lead, heads, groups * 8, 2, dim).transpose(-1, -2)
    halves = [half.reshape(*lead, heads, size, dim) for half in (keys, values)]
    paired = torch.stack(halves, -4)
    return paired if order == PAIRS else _split(paired)


def _split(blocks: torch.Tensor) -> torch.Tensor:
    """Of bf16 pairs: of each 128 numbers lower bytes, then signs and three bits, four bits of each
    number after all of these."""
    bits = blocks.contiguous().view(torch.int16).numpy().view(np.uint16)
    lead = bits.shape[:-4]
    # Halves of 64 numbers, each two vectors of four times four pairs, by turns.
    halves = bits.reshape(*lead, -1, 2, 2, 4, 8).swapaxes(-3, -2).reshape(*lead, -1, 2, 64)
    lower, upper = halves & 0xFF, halves >> 8
    codes = upper >> 4 & 8 | upper & 7
    rest = upper >> 3 & 15
    near = np.concatenate([lower.reshape(*lead, -1, 128), _nibbles(codes)], axis=-1)
    parts = [near.reshape(*lead, -1), _nibbles(rest).reshape(*lead, -1)]
    whole = np.concatenate(parts, axis=-1).astype(np.uint8)
    return torch.from_numpy(whole).view(torch.bfloat16).reshape(blocks.shape)


def _nibbles(halves: np.ndarray) -> np.ndarray:
    return halves[..., 0, :] | halves[..., 1, :] << 4


def num_tokens(texts: list[tuple[int, int]]) -> int:
    """The number of all tokens of texts, each given as (tokens before, tokens now)."""
    return sum(before + now for before, now in texts)


shapes = st.builds(
    lambda heads, **rest: Shape(*heads, **rest),
    st.sampled_from([(4, 4), (4, 2), (6, 1), (3, 3), (14, 2), (12, 4)]),
    head_dim=st.sampled_from([2, 8, 16, 40, 64, 80, 128, 160]),
    block_size=st.sampled_from([1, 4, 16, 48, 100]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    windows=st.sampled_from([(None, None), (5, None), (1, 17), (70, 200)]),
    order=st.sampled_from([0, 1, 2]),
    peer_stages=st.integers(0, 2),
)
