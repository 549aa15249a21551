"""Latent attention's sizes, from a checkpoint's config.json; imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from checkpoint.json_keys import JsonKeys
from engine.checkpoint.rope_config import RopeConfig

_MAX_WIDTH = 1 << 22


@dataclass(frozen=True)
class LatentConfig:
    """Attention whose keys and values are products of one latent vector per token (DeepSeek V2,
    https://arxiv.org/abs/2405.04434).

    A latent has `kv_lora_rank` numbers, from which each head's keys and values are computed, and
    `qk_rope_head_dim` rotated numbers that belong to the keys of all heads. Queries are products of
    the hidden state, or with `q_lora_rank` of a latent of their own. In the checkpoint, rotated
    numbers lie in pairs if `rope_interleave`, else in halves.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    rope_interleave: bool = True
    kv_b_in_parts: bool = False
    """Whether the files split `kv_b_proj` into `k_b_proj`, transposed for each head, and
    `v_b_proj`, as GGUF files may do."""

    @property
    def latent_dim(self) -> int:
        """Numbers that a token leaves in each layer's KV."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def most_absorbed(self) -> float:
        """The most queries of a sequence for which attending to latents takes no more arithmetic
        than computing keys and values from them first."""
        head_dims = self.qk_nope_head_dim + self.v_head_dim
        saved_per_query = 2 * self.kv_lora_rank - head_dims
        return self.kv_lora_rank * head_dims / saved_per_query if saved_per_query > 0 else math.inf


def parse_latent(keys: JsonKeys, rope: RopeConfig, num_heads: int) -> LatentConfig:
    """The sizes under DeepSeek's keys. Raises ModelLoadError."""
    rope_dim = _size(keys, "qk_rope_head_dim")
    if rope_dim % 2:
        raise keys.wrong("qk_rope_head_dim", "even")
    latent = LatentConfig(
        q_lora_rank=keys.integer("q_lora_rank", None, maximum=_MAX_WIDTH),
        kv_lora_rank=_size(keys, "kv_lora_rank"),
        qk_nope_head_dim=_size(keys, "qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=_size(keys, "v_head_dim"),
        softmax_scale=1.0,
        rope_interleave=keys.flag("rope_interleave", True),
        kv_b_in_parts=keys.flag("kv_b_in_parts", False),
    )
    for key, head_dim in (
        ("qk_nope_head_dim", latent.qk_head_dim),
        ("v_head_dim", latent.qk_nope_head_dim + latent.v_head_dim),
        ("kv_lora_rank", latent.kv_lora_rank if latent.kv_b_in_parts else 1),
    ):
        if num_heads * head_dim > _MAX_WIDTH:
            raise keys.wrong(key, f"smaller with num_attention_heads ({num_heads})")
    return replace(latent, softmax_scale=_softmax_scale(rope, latent.qk_head_dim))


def _softmax_scale(rope: RopeConfig, qk_head_dim: int) -> float:
    """The scale of scores, with YaRN's factor on queries and keys. YaRN itself would scale only
    their rotated parts."""
    scale = qk_head_dim**-0.5
    if rope.kind == "yarn" and rope.mscale_all_dim is not None and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return scale


def _size(keys: JsonKeys, key: str) -> int:
    size: int = keys.integer(key, maximum=_MAX_WIDTH)
    return size
