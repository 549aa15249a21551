"""Rotary position embeddings: cos and sin as a pure function of a token's own position.

Nothing here depends on the batch, the chunk or the length of the sequence. So a key is the same in
every chunking, on every worker and for every prefix-cache hit.

This matters for "dynamic" NTK, whose frequencies depend on the sequence's length beyond
`max_position_embeddings`. Up to that length, results equal transformers'. Beyond it, a token at
position p uses the frequencies of a sequence of p + 1 tokens, as transformers does when it
generates token by token. In a one-shot prefill of a longer prompt, transformers instead rotates
every token by the whole prompt's length; a paged cache cannot store such keys.

Formulas: Su et al. 2021 (https://arxiv.org/abs/2104.09864); linear interpolation, Chen et al.
2023 (https://arxiv.org/abs/2306.15595); YaRN and dynamic NTK, Peng et al. 2023
(https://arxiv.org/abs/2309.00071); llama3, the Llama 3.1 release
(GGUF files hold its stretch of each frequency: `divided`).
"""

from __future__ import annotations

import math

import torch

from engine.checkpoint.rope_config import RopeConfig

_TABLE_STEP = 4096


class Rope:
    """Turns positions into `(cos, sin)`, each `[N, head_dim / 2]`, for one model."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        self._config = config
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self._exponents = exponents.to(device)  # [head_dim / 2]
        self._ntk_power = head_dim / max(head_dim - 2, 1)  # "dynamic" needs head_dim > 2
        inverse_frequencies, self._scale = _frequencies(config, exponents)
        self._inverse_frequencies = inverse_frequencies.to(device)
        self._tables = self.cos_sin(torch.arange(0, device=device), torch.float32)

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin in fp32 of the positions 0 to P - 1, [P, head_dim / 2], P >= `length`.

        The tables are cached; a longer context recomputes them with at least twice the length.
        """
        known = len(self._tables[0])
        if known < length:
            size = -(-max(length, 2 * known) // _TABLE_STEP) * _TABLE_STEP
            positions = torch.arange(size, device=self._inverse_frequencies.device)
            self._tables = self.cos_sin(positions, torch.float32)
        return self._tables

    def cos_sin(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`positions` [N], integers; computed in fp32, returned in `dtype`, [N, head_dim / 2]."""
        inverse_frequencies = self._inverse_frequencies
        if self._config.kind == "dynamic":
            inverse_frequencies = self._dynamic_frequencies(positions)  # [N, head_dim / 2]
        angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)

    def _dynamic_frequencies(self, positions: torch.Tensor) -> torch.Tensor:
        longest, factor = self._config.max_position_embeddings, self._config.factor
        lengths = (positions + 1).clamp(min=longest).to(torch.float32)
        stretch = factor * lengths / longest - (factor - 1)
        bases = self._config.theta * stretch**self._ntk_power  # [N]
        return 1.0 / bases.unsqueeze(-1) ** self._exponents


def query_scale(config: RopeConfig, positions: torch.Tensor) -> torch.Tensor | None:
    """Factors of the queries at these positions [N], [N, 1, 1] in fp32; None if they are all 1.

    As in Llama 4 (https://github.com/huggingface/transformers, `get_llama_4_attn_scale`): the
    logarithm of how often the original context lies before a token.
    """
    if config.query_scaling_beta is None:
        return None
    contexts = torch.floor(positions / config.original_max_position_embeddings)
    return (1 + config.query_scaling_beta * torch.log1p(contexts)).view(-1, 1, 1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`heads` [N, num_heads, head_dim] rotated by `cos`, `sin` [N, head_dim / 2].

    The halves of a head are the two coordinates of the rotated planes (Hugging Face's order).
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _frequencies(config: RopeConfig, exponents: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the scale factor for cos and sin."""
    plain = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return plain / config.factor, 1.0
    if config.kind == "divided":
        return plain / torch.tensor(config.divisors, dtype=torch.float32), 1.0
    if config.kind == "llama3":
        return _llama3(config, plain), 1.0
    if config.kind == "yarn":
        return _yarn(config, plain), _yarn_scale(config)
    return plain, 1.0


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Stretches long wavelengths by `factor`, keeps short ones, and blends those in between."""
    wavelengths = 2 * math.pi / plain
    context = config.original_max_position_embeddings
    keep = (context / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / config.factor + keep * plain


def _yarn(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Keeps dimensions that rotate often over the original context, stretches the others."""
    head_dim = 2 * len(plain)

    def dimension(num_rotations: float) -> float:
        context = config.original_max_position_embeddings
        return (head_dim * math.log(context / (num_rotations * 2 * math.pi))) / (
            2 * math.log(config.theta)
        )

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp must not have the width 0
    ramp = (torch.arange(len(plain), dtype=torch.float32) - low) / (high - low)
    stretched = ramp.clamp(0.0, 1.0)
    return plain / config.factor * stretched + plain * (1 - stretched)


def _yarn_scale(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale is not None and config.mscale_all_dim is not None:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
