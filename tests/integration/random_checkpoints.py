"""Random checkpoints with the demo's tokenizer, and prompts on which transformers is sure."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tests.integration.reference import MIN_MARGIN, GreedyGeneration, Reference
from tests.paths import DEMO_MODEL

NUM_TOKENS = 12


def demo_without_weights(parent: Path) -> Path:
    """A folder named as the demo model, with all its files but the weights."""
    to = parent / DEMO_MODEL.name
    shutil.copytree(DEMO_MODEL, to, ignore=shutil.ignore_patterns("*.safetensors*"))
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
