"""Prompts that wait while a step computes another prompt with the same beginning. Pure.

Requests of one moment often share a prompt, for example the choices of one request. If they began
in the same step, each would compute all of it. So a prompt waits while steps compute blocks that it
lacks too, as long as these are at least half of what it lacks: then it computes only the rest. It
never waits for a prompt that makes no progress, nor for one of a lower priority: chunks of more
urgent prompts come before those of such a prompt, so the wait could be long.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduling.sequence import Sequence
from scheduling.step_plan import StepPlan

MOST_LEFT = 2
"""A prompt waits if it lacks at most this many times the tokens that it shares."""


class SharedPrompts:
    """The prompts of which a planned step, or one under way, computes blocks. `needs_all`: a prompt
    can only use the cached blocks of an equal one, because layers keep windows or states."""

    def __init__(self, step: StepPlan, prefilling: Iterable[Sequence], needs_all: bool) -> None:
        self._step = step
        self._under_way = [each for each in prefilling if each.num_ahead]
        self._needs_all = needs_all

    def hold_up(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence should begin later, with the blocks of another one."""
        if sequence.remote or sequence.needs_prompt_logits or not sequence.hashes:
            return False
        first = sequence.hashes[0]
        for chunk in self._step.batch.chunks:
            other = chunk.sequence
            if other.hashes and other.hashes[0] == first and self._is_worth(sequence, other):
                return True
        for other in self._under_way:
            if other.hashes and other.hashes[0] == first and self._is_worth(sequence, other):
                return True
        return False

    def _is_worth(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether the other prompt will leave enough of what the sequence lacks."""
        if other.priority < sequence.priority:
            return False
        common = _num_common(sequence.hashes, other.hashes)
        if self._needs_all and (
            common < len(sequence.hashes) or sequence.num_tokens != other.num_tokens
        ):
            return False
        size = sequence.block_size
        usable = min(common, (sequence.num_tokens - 1) // size)  # it computes its last token itself
        shared = usable * size - other.num_computed
        return shared > 0 and sequence.num_tokens - other.num_computed <= MOST_LEFT * shared


def _num_common(hashes: list[bytes], others: list[bytes]) -> int:
    """The number of equal leading hashes. A hash depends on all blocks before it."""
    low, high = 0, min(len(hashes), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
