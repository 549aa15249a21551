"""How much longer or shorter steps take than predicted: draws from measured factors.

Workers that share cores with each other, with routers and clients slow each other down, and not
always equally. So factors are kept by the number of other workers that compute when a step begins.
Pure, but for the random generator.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

Factors = tuple[tuple[float, ...], ...]
"""A step's time divided by the predicted one, by the number of other workers whose steps are under
way; the last ones hold for higher numbers, too. Each is equally likely."""

Classes = tuple[tuple[float, Factors], ...]
"""Factors of steps that are predicted to take up to a rising number of seconds; the last ones hold
for longer steps, too."""


@dataclass(frozen=True)
class StepNoise:
    """Measured factors of steps with prompt chunks, and of steps without."""

    chunks: Classes
    decodes: Classes

    def draw(
        self, has_chunks: bool, predicted_s: float, num_computing: int, rng: random.Random
    ) -> float:
        """The factor of a step that begins while so many other workers compute."""
        classes = self.chunks if has_chunks else self.decodes
        factors = next((each for most, each in classes if predicted_s <= most), classes[-1][1])
        return rng.choice(factors[min(num_computing, len(factors) - 1)])
