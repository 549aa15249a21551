"""Finds the candidate that meets its targets at the highest load, in rounds of equal load.

The load is a factor on the trace's speed. A candidate passes a round if enough requests are good.
Only candidates that pass go on to higher loads, so most candidates are tried at few loads. Pure:
the caller makes the trials of a round, and may run them in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt

from simulator.planning.candidates import Candidate

_LEAST_SPEED, _MOST_SPEED = 1 / 64, 64.0


@dataclass(frozen=True)
class Trial:
    """A candidate at a load: whether it passed, and its good requests per second and share if it
    did. `misses` has the number of requests that were not good by what they missed, as far as the
    trial went: a target's setting, or why they were refused."""

    passed: bool
    good_per_s: float = 0.0
    good_share: float = 0.0
    ttft_p99_ms: float = 0.0
    tpot_p99_ms: float = 0.0
    misses: dict[str, int] = field(default_factory=dict)


@dataclass
class Standing:
    """The results of a candidate so far: the highest load that it passed, with the trial, and the
    lowest load that it failed, with what requests missed there."""

    candidate: Candidate
    speed: float = 0.0
    trial: Trial | None = None
    failed_at: float | None = None
    misses: dict[str, int] = field(default_factory=dict)

    def note(self, speed: float, trial: Trial) -> None:
        """Take the outcome of a trial."""
        if trial.passed and speed > self.speed:
            self.speed, self.trial = speed, trial
        elif not trial.passed and (self.failed_at is None or speed < self.failed_at):
            self.failed_at, self.misses = speed, trial.misses

    def beats(self, other: Standing) -> bool:
        """Whether this candidate carried a load that the other one did not."""
        return other.failed_at is not None and other.failed_at <= self.speed

    @property
    def rank(self) -> tuple[float, float, Candidate]:
        """Smaller is better."""
        share = 0.0 if self.trial is None else self.trial.good_share
        return (-self.speed, -share, self.candidate)


Tries = Callable[[Sequence[Candidate], float], Sequence[Trial]]
"""Tries candidates at one load; returns one trial for each, in order."""


def race(candidates: Sequence[Candidate], tries: Tries, rounds: int) -> list[Standing]:
    """Every candidate's standing, the best first. Coarse rounds double or halve the load. Then
    `rounds` more rounds halve the interval in which the limit of the best candidate lies."""
    standings = [Standing(each) for each in candidates]

    def hold(running: Sequence[Standing], speed: float) -> list[Standing]:
        trials = tries([each.candidate for each in running], speed)
        for each, trial in zip(running, trials, strict=True):
            each.note(speed, trial)
        return [e for e, trial in zip(running, trials, strict=True) if trial.passed]

    low, speed = 0.0, 1.0
    running = standings
    while _LEAST_SPEED <= speed <= _MOST_SPEED:
        passed = hold(running, speed)
        if passed:
            low, running = speed, passed
        if bool(passed) == (speed < 1) and speed != 1:
            break  # the limit lies between this load and the one before
        speed = speed * 2 if low >= 1 else speed / 2
    if low and low < _MOST_SPEED:
        high = low * 2
        for _ in range(rounds):
            middle = sqrt(low * high)
            passed = hold(running, middle)
            if passed:
                low, running = middle, passed
            else:
                high = middle
    return sorted(standings, key=lambda each: each.rank)
