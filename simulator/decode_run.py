"""Steps of a worker that only decode, one after the other: when each of them ends. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from scheduling.batch import Batch


@dataclass(eq=False, slots=True)
class DecodeRun:
    """A run of steps that only decode, from `begun` on: `num_done` are over, `num_planned` more are
    leapt over at once. With `learns`, the step model learns from the first step."""

    batch: Batch
    begun: float
    rows: int
    context: int
    fixed_s: float
    slope_s: float
    learns: bool
    num_done: int = 0
    num_planned: int = 0

    def end(self, number: int) -> float:
        """The time when the first `number` steps of the run are over."""
        attended = self.context * number + self.rows * (number * (number - 1) // 2)
        return self.begun + (self.fixed_s * number + self.slope_s * attended)

    def num_over(self, now: float) -> int:
        """How many steps are over at the end of the step that is under way at `now`."""
        most = self.num_done + self.num_planned
        least = self.num_done + 1
        if least == most:
            return most
        step_s = self.fixed_s + self.slope_s * (self.context + self.rows * least)
        number = min(most, max(least, int((now - self.begun) / step_s)))
        while number < most and self.end(number) < now:
            number += 1
        while number > least and self.end(number - 1) >= now:
            number -= 1
        return number
