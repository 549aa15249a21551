"""The specification of how layers with windows use a prefill worker's memory: a model of its rules,
and an explicit-state check of it.

    python -m tests.specification.window_model

The code follows the rules `DESIGN` (`scheduling/group_rule.py`, `sequence_blocks.py`); change the
model first. Prompts consist of blocks, and a step computes one: it reads the blocks in the window
before it. A step may be launched while the previous one is under way. A prompt may begin behind
blocks of another prompt that it finds in the cache. At its end, a prompt keeps its blocks until its
decode worker (D) has granted room. D grants room only to a prompt that has begun, and has room for
one prompt.

Verdicts: "safe", no step reads a block that was given back; "alive", from every state all prompts
can end. All orders of admission, steps and grants are tried, in all pools that hold one prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

STEPS = 2
"""Steps of a prompt that may use its blocks: one under way, and the one that is launched next."""


@dataclass(frozen=True)
class Rules:
    """The design, and rules that are wrong on purpose."""

    holds_quota: bool = True  # False is wrong: a prompt begins with one block, and takes more later
    waits_for_landing: bool = True  # False is wrong: blocks are given back at launch
    pays_for_shared: bool = True  # False is wrong: a shared block is counted once


DESIGN = Rules()


class Prompt(NamedTuple):
    """`num_blocks` blocks; the first `prefix` are those of the first prompt."""

    num_blocks: int
    prefix: int = 0


class Run(NamedTuple):
    """A prompt at the worker: it has the blocks `first` to `end`, and D has `granted` it room."""

    phase: str = "waits"  # begun, over
    first: int = 0
    end: int = 0
    launched: int = 0
    landed: int = 0
    granted: bool = False


State = tuple[Run, ...]


@dataclass(frozen=True)
class Worker:
    """A pool of `pool` blocks, a window of `window` blocks before a step's own, and the prompts."""

    pool: int
    window: int
    prompts: tuple[Prompt, ...]
    rules: Rules = DESIGN

    def quota(self, prompt: Prompt, first: int) -> int:
        """The blocks that a prompt needs at a time, from `first` on."""
        return min(prompt.num_blocks - first, self.window + STEPS)

    def free(self, state: State) -> int:
        """Blocks that can be allocated."""
        used = sum(run.end - run.first for run in state)
        if not self.rules.pays_for_shared:
            owner = set(range(state[0].first, state[0].end))
            for prompt, run in zip(self.prompts[1:], state[1:], strict=True):
                used -= len(owner & set(range(run.first, min(run.end, prompt.prefix))))
        return self.pool - used

    def successors(self, state: State) -> Iterator[State]:
        """Every possible next state."""
        for index, (prompt, run) in enumerate(zip(self.prompts, state, strict=True)):
            for after in (
                self._begin(state, prompt, run),
                self._launch(state, prompt, run),
                run._replace(landed=run.landed + 1) if run.landed < run.launched else None,
                self._grant(state, run),
                Run("over") if run.granted and run.landed == prompt.num_blocks else None,
            ):
                if after is not None:
                    yield (*state[:index], after, *state[index + 1 :])

    def _begin(self, state: State, prompt: Prompt, run: Run) -> Run | None:
        if run.phase != "waits":
            return None
        start = prompt.prefix if self._is_cached(state, prompt) else 0
        first = max(0, start - self.window)
        held = self.quota(prompt, first) if self.rules.holds_quota else start - first + 1
        shared = 0 if self.rules.pays_for_shared else start - first
        if self.free(state) < held - shared:
            return None
        return Run("begun", first, first + held, start, start)

    def _is_cached(self, state: State, prompt: Prompt) -> bool:
        owner = state[0]
        covers = owner.first <= prompt.prefix - self.window and owner.landed >= prompt.prefix
        return prompt.prefix > 0 and owner.phase == "begun" and covers

    def _launch(self, state: State, prompt: Prompt, run: Run) -> Run | None:
        """Give back what has left the window, take as many blocks for it, and launch a step."""
        is_ready = run.launched < prompt.num_blocks and run.launched - run.landed < STEPS
        if run.phase != "begun" or not is_ready:
            return None
        edge = run.landed if self.rules.waits_for_landing else run.launched
        slid = run._replace(first=max(run.first, edge - self.window))
        room = self.free(tuple(slid if each is run else each for each in state))
        needed = slid.first + self.quota(prompt, slid.first)
        end = max(slid.end, min(needed, slid.end + room))
        if not self.rules.holds_quota:
            end = min(end, max(slid.end, run.launched + 1))
        if end <= run.launched:
            return None
        return slid._replace(end=end, launched=run.launched + 1)

    def _grant(self, state: State, run: Run) -> Run | None:
        is_full = any(each.granted for each in state)
        return run._replace(granted=True) if run.phase == "begun" and not is_full else None

    def reads_lost(self, state: State) -> bool:
        """Whether a step under way reads a block that was given back."""
        return any(
            run.landed < run.launched and run.first > max(0, run.landed - self.window)
            for run in state
        )


def verdicts(worker: Worker) -> tuple[bool, bool]:
    """Whether the worker is safe, and whether it is alive."""
    start: State = (Run(),) * len(worker.prompts)
    before: dict[State, set[State]] = {start: set()}
    todo, is_safe = [start], True
    while todo:
        state = todo.pop()
        is_safe = is_safe and not worker.reads_lost(state)
        for after in worker.successors(state):
            if after not in before:
                before[after] = set()
                todo.append(after)
            before[after].add(state)
    alive = {state for state in before if all(run.phase == "over" for run in state)}
    todo = list(alive)
    while todo:
        fresh = before[todo.pop()] - alive
        alive |= fresh
        todo += fresh
    return is_safe, len(alive) == len(before)


PAIRS = ((Prompt(4), Prompt(5)), (Prompt(6), Prompt(5, prefix=2)))
THREE = ((Prompt(5), Prompt(5, prefix=3), Prompt(2)),)


def workers(rules: Rules, mixes: tuple[tuple[Prompt, ...], ...]) -> Iterator[Worker]:
    """Small workers that hold at least one of their prompts."""
    for window in (1, 2):
        for prompts in mixes:
            least = max(min(each.num_blocks, window + STEPS) for each in prompts)
            for pool in range(least, 2 * least + 2):
                yield Worker(pool, window, prompts, rules)


def check(
    rules: Rules = DESIGN, mixes: tuple[tuple[Prompt, ...], ...] = PAIRS
) -> tuple[bool, bool]:
    """Whether all these workers are safe, and whether all are alive."""
    found = [verdicts(worker) for worker in workers(rules, mixes)]
    return all(safe for safe, _ in found), all(alive for _, alive in found)


if __name__ == "__main__":
    for name, rules in (
        ("design", DESIGN),
        ("no quota", Rules(holds_quota=False)),
        ("edge of what is launched", Rules(waits_for_landing=False)),
        ("shared blocks cost nothing", Rules(pays_for_shared=False)),
    ):
        print(f"{name}: safe, alive: {check(rules, PAIRS + THREE)}")
