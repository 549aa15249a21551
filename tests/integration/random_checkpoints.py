"""Random checkpoints with the demo's tokenizer, and prompts on which transformers is sure."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.integration.reference import MIN_MARGIN, GreedyGeneration, Reference
from tests.paths import DEMO_MODEL

NUM_TOKENS = 12
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 48,
    "intermediate_size": 72,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": None,
}
"""What configurations of random checkpoints have in common."""


def random_checkpoint(parent: Path, make: Callable[[], Any]) -> Path:
    """A folder named as the demo model, with its tokenizer and the random weights of the model of
    transformers that `make` returns."""
    to = parent / DEMO_MODEL.name
    shutil.copytree(DEMO_MODEL, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    torch.manual_seed(5)
    make().save_pretrained(to)
    return to


class Expected:
    """Random prompts, with what transformers makes of them."""

    def __init__(self, folder: Path) -> None:
        self._generate, self._chance = GreedyGeneration(folder, NUM_TOKENS), random.Random(3)

    def after(self, known: tuple[int, ...], length: int) -> Reference:
        """A prompt that begins with `known` and has `length` more tokens."""
        while True:
            prompt = (*known, *(self._chance.randrange(3, 1800) for _ in range(length)))
            output, margin = self._generate(prompt)
            if margin >= MIN_MARGIN / 10:
                return Reference(prompt, tuple(output))
