"""Leaps over steps in which a fixed set of sequences decodes and nothing else happens.

A leap leaves a scheduler as the same number of `schedule` and `commit` calls would, at the cost of
one: `tests/unit/simulator/test_leaps.py` compares the two. It ends with the step in which the first
sequence finishes, or before the first one for which a sequence could be preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial

from scheduling.batch import Batch
from scheduling.scheduler import Scheduler
from scheduling.states.rule import StateRule
from simulator.sequences import SimulatedSequence, counted

MAX_STEPS = 4096
MOST_EXCHANGED = 2
"""Blocks, or slots of states, that leave a window at the end of a block."""


def longest_leap(scheduler: Scheduler, decodes: Seq[SimulatedSequence]) -> int:
    """How many steps, at least 1, can follow each other, beginning with a planned step that decodes
    these sequences and has its blocks."""
    most = min([each.sampling.max_tokens + each.num_prompt - len(each.tokens) for each in decodes])
    most = min(most, MAX_STEPS)
    needed: Callable[[Seq[SimulatedSequence], int], int]
    if not scheduler.pools.has_windows:
        free = scheduler.blocks.num_free
        needed = _new_blocks
    elif _may_admit(scheduler):
        return 1
    else:
        free = scheduler.pools.num_pages - scheduler.pools.num_used
        needed = partial(_most_pages, scheduler)
    if needed(decodes, most) <= free:
        return most
    least = 1
    while least < most:
        middle = (least + most + 1) // 2
        if needed(decodes, middle) <= free:
            least = middle
        else:
            most = middle - 1
    return least


def advance(
    scheduler: Scheduler, decodes: Seq[SimulatedSequence], num_steps: int, ended: float
) -> list[SimulatedSequence]:
    """Decode `num_steps` tokens of each sequence, the last one at `ended`. Returns the sequences
    that have finished; they are out of the scheduler."""
    if scheduler.pools.has_windows or scheduler.blocks.num_cached:
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


def plan_next(scheduler: Scheduler, decodes: Seq[SimulatedSequence]) -> None:
    """Give sequences their blocks for the next step, as `Scheduler.schedule` does."""
    tables = scheduler.tables
    if scheduler.pools.has_windows:
        keys = {each.key for each in decodes}
        tables.slide([each for key, each in scheduler.roster.running.items() if key in keys])
    for each in decodes:
        has_room = tables.try_grow(each)
        assert has_room, "a leap ends before a sequence lacks room"
    tables.stage(Batch(decodes=[*decodes]))


def _may_admit(scheduler: Scheduler) -> bool:
    """Whether a sequence waits for memory: windows give some back while sequences decode."""
    waiting = scheduler.roster.waiting.values()
    return any(not each.remote or each.source_has_begun for each in waiting)


def _new_blocks(decodes: Seq[SimulatedSequence], num_steps: int) -> int:
    """Blocks that the sequences lack for this many steps, in the first group."""
    return sum(
        [
            -(-(len(each.tokens) + num_steps - 1) // each.block_size) - each.tables[0].end
            for each in decodes
        ]
    )


def _most_pages(scheduler: Scheduler, decodes: Seq[SimulatedSequence], num_steps: int) -> int:
    """The most pages that the sequences take in this many steps. What leaves a window makes room
    for the next block; only if it is cached, a page may be taken instead."""
    boundaries = sum([num_steps // each.block_size + 1 for each in decodes if each.content])
    num_pages = 0
    for group, rule in enumerate(scheduler.pools.rules):
        lacking = 0
        for each in decodes:
            table, num_blocks = each.tables[group], each.blocks_for(len(each.tokens) + num_steps)
            held = rule.held(num_blocks, 1) - len(table.blocks)
            lacking += max(0, min(held, num_blocks - table.end))
        num_pages += rule.pages(lacking)
        if rule.window is not None:
            num_pages += MOST_EXCHANGED * boundaries
    return num_pages


def _allocate(scheduler: Scheduler, decodes: Seq[SimulatedSequence], num_steps: int) -> None:
    """Allocate in bulk: where nothing is cached, the order does not matter."""
    for each in decodes:
        blocks, num_tokens = each.tables[0].blocks, len(each.tokens) + num_steps - 1
        lacking = -(-num_tokens // each.block_size) - len(blocks)
        if lacking > 0:
            blocks += scheduler.blocks.allocate(lacking)
        if each.content:
            _publish(scheduler, each, each.num_computed + num_steps)


def _publish(scheduler: Scheduler, sequence: SimulatedSequence, num_computed: int) -> None:
    """Cache the blocks that are full and computed, as `Scheduler` does after a step."""
    complete = min(num_computed // sequence.block_size, len(sequence.content))
    for index in range(sequence.num_published, complete):
        scheduler.blocks.publish(sequence.block_table[index], sequence.content[index])
    sequence.num_published = max(sequence.num_published, complete)


def _move_blocks(scheduler: Scheduler, decodes: Seq[SimulatedSequence], num_steps: int) -> None:
    """Do what the steps do to blocks, in their order, because evictions depend on it."""
    has_states = any(isinstance(rule, StateRule) for rule in scheduler.pools.rules)
    agenda: dict[int, list[SimulatedSequence]] = {}
    for each in decodes:
        for step in _busy_steps(each, num_steps, has_states):
            agenda.setdefault(step, []).append(each)
    begun = [(each.num_computed, len(each.tokens)) for each in decodes]
    computed = {each.request_id: each.num_computed for each in decodes}
    for step in sorted(agenda):
        due = agenda[step]
        for each in due:
            each.num_computed = computed[each.request_id] + step
            each.tokens = counted(each.num_computed + 1)
            each.extend_hashes()
        if step:
            plan_next(scheduler, due)
        for each in due:
            each.num_computed += 1
            scheduler.tables.publish(each)
    for each, (num_computed, num_tokens) in zip(decodes, begun, strict=True):
        each.num_computed, each.tokens = num_computed, counted(num_tokens)


def _busy_steps(sequence: SimulatedSequence, num_steps: int, has_states: bool) -> Iterator[int]:
    """The steps of a leap that change the blocks of a sequence, ascending: the one that fills a
    block, and the one after it, which needs another block. Each step stores a state, in two slots
    by turns: of those between, an even number leaves everything as it was."""
    size = sequence.block_size
    fills = range(size - 1 - sequence.num_computed % size, num_steps, size)
    busy = {step for fill in fills for step in (fill, fill + 1)}
    if has_states:
        busy.add(0)
    next_step = 0
    for step in sorted(busy):
        if step >= num_steps:
            break
        if has_states and (step - next_step) % 2:
            yield next_step
        yield step
        next_step = step + 1
    if has_states and (num_steps - next_step) % 2:
        yield next_step
