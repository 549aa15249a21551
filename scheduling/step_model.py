"""Predicts how long a step takes, learned from measured steps.

`seconds = fixed + per_token * tokens + per_attended * attended`, where `attended` counts
(query, key) pairs: a chunk of n tokens at context c attends n*c + n*(n+1)/2. Fitted online by
recursive least squares with stabilised forgetting (Kulhavý and Zarrop, On a general concept of
forgetting, 1993). Pure; torch-free; the simulator and the router use the same three coefficients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

# Inside the fit the features are scaled so that their magnitudes are comparable.
_SCALE = (1.0, 1e-2, 1e-4)


_Vector = tuple[float, float, float]
_Symmetric = tuple[float, float, float, float, float, float]


def attended_pairs(num_tokens: int, context: int) -> int:
    """Query-key pairs of `num_tokens` new tokens after `context` computed ones."""
    return num_tokens * context + num_tokens * (num_tokens + 1) // 2


class StepCost(msgspec.Struct, frozen=True, gc=False):
    """The features of a step that determine its time."""

    num_tokens: int = 0
    attended: int = 0

    def plus(self, num_tokens: int, context: int) -> StepCost:
        """This step with `num_tokens` more tokens of a sequence at `context`."""
        return StepCost(
            self.num_tokens + num_tokens, self.attended + attended_pairs(num_tokens, context)
        )


@dataclass
class StepTotals:
    """The sums over all observed steps: their times, and the times that the model had predicted."""

    seconds: float = 0.0
    predicted_s: float = 0.0
    error_s: float = 0.0
    """The absolute errors of all predictions."""


class StepModel:
    """The fitted model. It starts from a cautious guess and forgets slowly."""

    def __init__(
        self,
        fixed_s: float = 1e-3,
        per_token_s: float = 2e-4,
        per_attended_s: float = 1e-8,
        forgetting: float = 0.98,
    ) -> None:
        self._theta: _Vector = (
            fixed_s / _SCALE[0],
            per_token_s / _SCALE[1],
            per_attended_s / _SCALE[2],
        )
        self._information = (1.0, 0.0, 0.0, 1.0, 0.0, 1.0)
        """The upper triangle of the inverse covariance, row by row."""
        self._forgetting = forgetting
        self.totals = StepTotals()

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """`(fixed_s, per_token_s, per_attended_s)`, never negative."""
        fixed, token, attended = self._theta
        return (
            max(0.0, fixed * _SCALE[0]),
            max(0.0, token * _SCALE[1]),
            max(0.0, attended * _SCALE[2]),
        )

    def predict(self, cost: StepCost) -> float:
        """Expected duration of a step of this cost, in seconds."""
        fixed, token, attended = self.coefficients
        return fixed + token * cost.num_tokens + attended * cost.attended

    def tokens_within(self, budget_s: float, base: StepCost, context: int, limit: int) -> int:
        """The largest n <= `limit` so that `base` plus n tokens at `context` takes `budget_s` at
        most."""
        _, token, attended = self.coefficients
        room = budget_s - self.predict(base)
        if room <= 0:
            return 0
        if math.isinf(room):
            return limit
        # attended/2 * n^2 + (token + attended * (context + 1/2)) * n - room <= 0
        a = attended / 2
        b = token + attended * (context + 0.5)
        if a < 1e-18:
            return limit if b <= 0 or room / b >= limit else int(room / b)
        root = (math.sqrt(b * b + 4 * a * room) - b) / (2 * a)
        return min(limit, int(root))

    def observe(self, cost: StepCost, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        x = (_SCALE[0], cost.num_tokens * _SCALE[1], cost.attended * _SCALE[2])
        fixed, token, attended = self._theta
        predicted = fixed * x[0] + token * x[1] + attended * x[2]
        error = seconds - predicted
        totals = self.totals
        totals.seconds += seconds
        totals.predicted_s += max(0.0, predicted)
        totals.error_s += abs(error)
        self._information = _informed(self._information, x, self._forgetting)
        gain = _solved(self._information, x)
        self._theta = (fixed + gain[0] * error, token + gain[1] * error, attended + gain[2] * error)


def _informed(known: _Symmetric, x: _Vector, forgetting: float) -> _Symmetric:
    """The information after an observation at `x`. Known information decays towards that of the
    initial guess, not towards none. Identical steps teach nothing about other steps. Without any
    information about the others, the first of them with an unlucky time would upset the fit."""
    a, b, c, d, e, f = known
    u, v, w = x
    kept, least = forgetting, 1.0 - forgetting
    return (
        kept * a + least + u * u,
        kept * b + u * v,
        kept * c + u * w,
        kept * d + least + v * v,
        kept * e + v * w,
        kept * f + least + w * w,
    )


def _solved(matrix: _Symmetric, x: _Vector) -> _Vector:
    """The y with `matrix @ y = x`, by cofactors; the matrix is positive definite."""
    a, b, c, d, e, f = matrix
    u, v, w = x
    aa, ab, ac = d * f - e * e, c * e - b * f, b * e - c * d
    bb, bc, cc = a * f - c * c, b * c - a * e, a * d - b * b
    scale = 1.0 / (a * aa + b * ab + c * ac)
    return (
        (aa * u + ab * v + ac * w) * scale,
        (ab * u + bb * v + bc * w) * scale,
        (ac * u + bc * v + cc * w) * scale,
    )
