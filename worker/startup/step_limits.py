"""The defaults of a step's limits: sequences, prompt tokens, and whether steps run ahead.

A card needs far more tokens than a CPU to be busy. A prefill worker can take larger chunks than a
decode worker, because no decodes wait beside its chunks. A large chunk also needs memory for its
activations, so a small card gets smaller chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.device import pick_device
from worker.settings import WorkerSettings

_CPU = (64, 512)
_CARD_SEQUENCES = 256
_TOKENS_PER_GIB = 256  # largest chunk of a card: 8,192 tokens from 32 GiB on
_LEAST_CARD_TOKENS = 2048


@dataclass(frozen=True)
class StepLimits:
    """The most sequences of a step, the fewest and most prompt tokens of its chunks, and the most
    of each chunk."""

    max_batch_size: int
    chunk_min_tokens: int
    chunk_max_tokens: int
    prompt_max_tokens: int | None = None


def step_limits(settings: WorkerSettings, card_bytes: int | None) -> StepLimits:
    """The limits in the settings, or else the defaults of the role and the device: a card with
    `card_bytes` of memory, or a CPU (None)."""
    sequences, tokens = _CPU
    if card_bytes is not None:
        sequences = _CARD_SEQUENCES
        fitting = max(_LEAST_CARD_TOKENS, _TOKENS_PER_GIB * (card_bytes >> 30))
        tokens = min(settings.card_chunk_tokens, fitting)
    least = max(settings.chunk_min_tokens, settings.block_size)
    return StepLimits(
        settings.max_batch_size or sequences,
        least,
        max(settings.chunk_max_tokens or tokens, least),
        settings.prompt_chunk_tokens and max(settings.prompt_chunk_tokens, settings.block_size),
    )


def prefill_steps_ahead(settings: WorkerSettings) -> tuple[int, int]:
    """How many steps a prefill worker launches before it reads an earlier one's result, and the
    stages that compute them. Chunks need no earlier token, so each stage may have a step."""
    num_stages = settings.pipeline_parallel
    if num_stages > 1 and settings.one_step_ahead != "off":
        return num_stages - 1, num_stages
    return int(goes_ahead(settings)), 1


def goes_ahead(settings: WorkerSettings) -> bool:
    """Whether the engine runs one step ahead. Stages of a pipeline cannot: decodes need tokens that
    the last stage has not chosen yet."""
    if settings.pipeline_parallel > 1:
        return False
    if settings.one_step_ahead == "auto":
        return pick_device(settings.device).type == "cuda"
    return settings.one_step_ahead == "on"


def card_bytes(device: torch.device) -> int | None:
    """The memory of a card in bytes; None for a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)
