"""Latent attention on a card, by torch: its error, and how long decodes and chunks take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

from bench.gpu.card import BLOCK_SIZE, Row
from engine.attention.base import Segment
from engine.attention.latents import UpProjection
from engine.attention.torch_latents import TorchLatentAttention
from engine.checkpoint.latent_config import LatentConfig
from engine.device import wait_for
from engine.kv_pool import KvPool
from protocol.layout import KvLayout

_DEEPSEEK = LatentConfig(1536, 512, 128, 64, 128, 0.1)
_CPU = torch.device("cpu")
_MOST_ERROR = "0.02"
_REPEATS = 5
_SEED = 7
Text = tuple[int, int]
"""Tokens before, and tokens now."""


@dataclass(frozen=True)
class LatentLoad:
    """One layer of DeepSeek V3, by default, and the texts that it is tried with."""

    config: LatentConfig = _DEEPSEEK
    num_heads: int = 128
    compared: Sequence[Text] = ((999, 1), (40, 1), (200, 60), (700, 300))
    timed: dict[str, Sequence[Text]] = field(
        default_factory=lambda: {
            "decode, 1 x 8,192": [(8191, 1)],
            "decode, 32 x 4,096": [(4095, 1)] * 32,
            "chunk of 2,048": [(0, 2048)],
            "chunk of 2,048 after 6,144": [(6144, 2048)],
        }
    )


def check_latents(device: torch.device, load: LatentLoad) -> Iterator[Row]:
    """Error of bf16 on the card over fp32 on the CPU, relative to the largest value, and times."""
    expected = _run(load, load.compared, _CPU, "float32")[0]
    found = _run(load, load.compared, device, "bfloat16")[0]
    error = (found - expected).abs().max() / expected.abs().max()
    yield Row("latents", "error, absorbed and expanded", error.item(), "", f"< {_MOST_ERROR}")
    for name, texts in load.timed.items():
        yield Row("latents", name, _run(load, texts, device, "bfloat16")[1], "ms", note="a layer")


@torch.inference_mode()
def _run(
    load: LatentLoad, texts: Sequence[Text], device: torch.device, dtype: str
) -> tuple[torch.Tensor, float]:
    """The result in fp32 on the CPU, of numbers that bf16 holds, and the least milliseconds."""
    chance, config = torch.Generator().manual_seed(_SEED), load.config

    def random(*shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=chance).bfloat16()
        return numbers.to(device, getattr(torch, dtype))

    sizes = [-(-sum(text) // BLOCK_SIZE) for text in texts]
    layout = KvLayout(
        model_fingerprint="bench",
        dtype=dtype,
        num_layers=1,
        num_planes=1,
        num_kv_heads=1,
        block_size=BLOCK_SIZE,
        head_dim=config.latent_dim,
    )
    pool = KvPool(layout, sum(sizes), device)
    pool.tensor.copy_(random(*pool.tensor.shape))
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    tables = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    attention = TorchLatentAttention(pool, config)
    rows = config.qk_nope_head_dim + config.v_head_dim
    weight = random(load.num_heads, rows, config.kv_lora_rank) * config.kv_lora_rank**-0.5
    flat = weight.flatten(0, 1)
    up = UpProjection(weight, config.qk_nope_head_dim, lambda x: linear(x, flat))
    num_tokens = sum(now for _, now in texts)
    q = random(num_tokens, load.num_heads, config.qk_head_dim)
    latents = random(num_tokens, config.latent_dim)
    attention.plan(
        [
            Segment(now, before + now, table)
            for (before, now), table in zip(texts, tables, strict=True)
        ]
    )
    least = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        result = attention.run_latents(0, q, latents, up)
        wait_for(device)
        least = min(least, time.perf_counter() - started)
    return result.float().cpu(), 1e3 * least
