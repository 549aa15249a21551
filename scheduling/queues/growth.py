"""Blocks for the next tokens of running sequences, and who is preempted if there are none. Pure."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from scheduling.queues.roster import Roster
from scheduling.sequence import Sequence, SequenceState
from scheduling.sequence_blocks import SequenceBlocks
from scheduling.turns import Turns


class Growth:
    """Allocates blocks for the running sequences of `roster`. A sequence that was preempted
    `immune` times is preempted only if no other can be."""

    def __init__(self, roster: Roster, blocks: SequenceBlocks, turns: Turns, immune: int) -> None:
        self._roster = roster
        self._blocks = blocks
        self._turns = turns
        self._immune = immune

    def grow(
        self, running: Seq[Sequence], preempt: Callable[[Sequence], None], frees_soon: bool
    ) -> tuple[list[Sequence] | None, list[Sequence]]:
        """Allocate blocks for each running sequence whose next token needs some, oldest first. If
        none are free, preempt the youngest sequence.

        Returns the sequences that decode and those that were preempted. The first is None if the
        victim is in the step under way, or if blocks become free when that step has landed
        (`frees_soon`).
        """
        preempted: list[Sequence] = []
        lacks_room = self._blocks.lacks_room
        for sequence in running:
            while sequence.state is SequenceState.RUNNING and lacks_room(sequence):
                if _is_ending(sequence):
                    break
                if self._blocks.try_grow(sequence):
                    continue
                victim = self._victim()
                if victim.num_steps or frees_soon:
                    return None, preempted
                preempt(victim)
                preempted.append(victim)
        left = [sequence for sequence in running if sequence.state is SequenceState.RUNNING]
        return [s for s in left if not s.num_ahead or not _is_ending(s)], preempted

    def _victim(self) -> Sequence:
        """The sequence to preempt: the least senior of those that are not immune, or of all if
        there are none.

        The most senior sequence is chosen last, so at least one always makes progress. Prompts that
        end here are never chosen, because a peer reads their blocks.
        """
        started = (*self._roster.prefilling.values(), *self._roster.running.values())
        candidates = [sequence for sequence in started if not sequence.prefill_only]
        assert candidates, "the sequence that lacks a block can be preempted itself"
        seniority, immune = self._turns.seniority, self._immune
        return max(candidates, key=lambda s: (s.num_preemptions < immune, seniority(s)))


def _is_ending(sequence: Sequence) -> bool:
    """Whether the step under way gives a running sequence its last token by `max_tokens`."""
    return (
        sequence.num_ahead > 0
        and sequence.num_output + sequence.num_ahead >= sequence.sampling.max_tokens
    )
