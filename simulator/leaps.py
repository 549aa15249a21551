"""Leaps over steps in which a fixed set of sequences decodes and nothing else happens.

A leap leaves a scheduler as the same number of `schedule` and `commit` calls would, at the cost of
one: `tests/unit/simulator/test_leaps.py` compares the two. It ends with the step in which the first
sequence finishes, or before the first one for which a sequence would be preempted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from scheduling.scheduler import Scheduler
from simulator.sequences import SimulatedSequence

MAX_STEPS = 4096


def longest_leap(scheduler: Scheduler, decodes: Seq[SimulatedSequence]) -> int:
    """How many steps, at least 1, can follow each other, beginning with a planned step that decodes
    these sequences and has its blocks."""
    most = min([each.sampling.max_tokens + each.num_prompt - len(each.tokens) for each in decodes])
    most = min(most, MAX_STEPS)
    free = scheduler.blocks.num_free
    if _new_blocks(decodes, most) <= free:
        return most
    least = 1
    while least < most:
        middle = (least + most + 1) // 2
        if _new_blocks(decodes, middle) <= free:
            least = middle
        else:
            most = middle - 1
    return least


def advance(
    scheduler: Scheduler, decodes: Seq[SimulatedSequence], num_steps: int, ended: float
) -> list[SimulatedSequence]:
    """Decode `num_steps` tokens of each sequence, the last one at `ended`. Returns the sequences
    that have finished; they are out of the scheduler."""
    if scheduler.blocks.num_cached:
        _move_blocks(scheduler, decodes, num_steps)
    else:
        _allocate(scheduler, decodes, num_steps)
    finished = []
    for sequence in decodes:
        sequence.num_computed += num_steps
        over = sequence.extend(num_steps)
        scheduler.turns.charge(sequence, num_steps)
        sequence.last_token_at = ended
        if over is not None:
            scheduler.finish(sequence)
            finished.append(sequence)
    return finished


def _new_blocks(decodes: Seq[SimulatedSequence], num_steps: int) -> int:
    """Blocks that the sequences lack for this many steps."""
    return sum(
        [
            -(-(len(each.tokens) + num_steps - 1) // each.block_size) - len(each.tables[0].blocks)
            for each in decodes
        ]
    )


def _allocate(scheduler: Scheduler, decodes: Seq[SimulatedSequence], num_steps: int) -> None:
    """Allocate in bulk: where nothing is cached, the order does not matter."""
    for each in decodes:
        blocks = each.tables[0].blocks
        lacking = each.blocks_for(len(each.tokens) + num_steps - 1) - len(blocks)
        if lacking > 0:
            blocks += scheduler.blocks.allocate(lacking)
        if each.content:
            _publish(scheduler, each, each.num_computed + num_steps)


def _move_blocks(scheduler: Scheduler, decodes: Seq[SimulatedSequence], num_steps: int) -> None:
    """Allocate and publish in the order of the steps, because evictions depend on it."""
    moves: list[tuple[int, int, int]] = []
    for rank, each in enumerate(decodes):
        size, num_tokens = each.block_size, len(each.tokens)
        # the step that computes token t needs its block, and fills the block if it ends there
        full = size * len(each.block_table)
        moves += [(at, 0, rank) for at in range(full - num_tokens + 1, num_steps, size)]
        if len(each.content) > each.num_published:
            first = size * (each.num_published + 1) - each.num_computed - 1
            moves += [(at, 1, rank) for at in range(max(0, first), num_steps, size)]
    moves.sort()
    for at, publishes, rank in moves:
        each = decodes[rank]
        if publishes:
            _publish(scheduler, each, each.num_computed + at + 1)
        else:
            each.block_table += scheduler.blocks.allocate(1)


def _publish(scheduler: Scheduler, sequence: SimulatedSequence, num_computed: int) -> None:
    """Cache the blocks that are full and computed, as `Scheduler` does after a step."""
    complete = min(num_computed // sequence.block_size, len(sequence.content))
    for index in range(sequence.num_published, complete):
        scheduler.blocks.publish(sequence.block_table[index], sequence.content[index])
    sequence.num_published = max(sequence.num_published, complete)
