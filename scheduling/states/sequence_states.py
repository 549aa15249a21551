"""The slots of sequences in the group of layers that keep a state.

A sequence's table begins with the slots that it keeps: for the state at its last block boundary,
and for the one after its last computed token. Behind these are spare slots. A step reads the last
state and writes others into spares (`stage`); when it is committed, the table is put in order
(`advance`). A step that is dropped or computed again has changed nothing.

States at block boundaries are cached as blocks are, so a prompt can go on behind them: those at a
prompt's end, the last one that decoding crosses, one every `checkpoint_blocks`, and the one where a
prompt leaves a cached prefix that has no state there. A slot that is cached, or that another
sequence holds, is never written again: it is exchanged for another one. Pure.
"""

from __future__ import annotations

from scheduling.large_pages import GroupBlocks
from scheduling.sequence import BlockTable, Sequence
from scheduling.states.rule import StateRule
from scheduling.states.step import StateStep


class SequenceStates:
    """The slots of all sequences in group `group`."""

    def __init__(
        self, group: int, manager: GroupBlocks, rule: StateRule, checkpoint_blocks: int
    ) -> None:
        self._group = group
        self._manager = manager
        self._rule = rule
        self._every = checkpoint_blocks

    def stage(self, sequence: Sequence, start: int, num_tokens: int, completes: bool) -> None:
        """Choose the slots of a step that computes `num_tokens` of a sequence from `start`;
        `completes`: the last ones of its prompt."""
        table = sequence.tables[self._group]
        num_kept = self._num_kept(table, start)
        spares = table.blocks[num_kept:]
        ends = self._ends(sequence, start, start + num_tokens, completes, len(spares))
        sequence.state_step = StateStep(
            start,
            table.blocks[num_kept - 1] if start else None,
            tuple((end - start, slot) for end, slot in zip(ends, spares, strict=False)),
        )

    def advance(self, sequence: Sequence) -> None:
        """The staged step of a sequence is committed, if its tokens are computed now."""
        step = sequence.state_step
        if step is None or step.end != sequence.num_computed:
            return
        sequence.state_step = None
        size, table = self._rule.block_size, sequence.tables[self._group]
        num_kept = self._num_kept(table, step.start)
        known = {(table.first + at + 1) * size: table.blocks[at] for at in range(num_kept)}
        if step.read is not None:
            known.pop(-(-step.start // size) * size)
            known[step.start] = step.read
        written = {step.start + num_tokens: slot for num_tokens, slot in step.writes}
        for end, slot in written.items():
            if end % size == 0 and end != step.end:
                self._publish(sequence, end // size - 1, slot)
        known |= written
        boundary = (step.end - 1) // size * size
        self._keep(sequence, table, [end for end in (boundary, step.end) if end in known], known)

    def jump(self, sequence: Sequence, block: int, slot: int) -> None:
        """The state at the end of a block was fetched into a slot of the sequence."""
        table, end = sequence.tables[self._group], (block + 1) * self._rule.block_size
        self._keep(sequence, table, [end], {end: slot})

    def trim(self, sequence: Sequence, step_tokens: int) -> None:
        """Give back the slots that steps of `step_tokens` do not need."""
        table = sequence.tables[self._group]
        held = self._rule.held(0, step_tokens)
        if len(table.blocks) > held:
            self._manager.release(table.blocks[held:])
            del table.blocks[held:]

    def _num_kept(self, table: BlockTable, num_computed: int) -> int:
        """The number of slots that hold states once `num_computed` tokens are computed."""
        return -(-num_computed // self._rule.block_size) - table.first if num_computed else 0

    def _ends(
        self, sequence: Sequence, start: int, end: int, completes: bool, num_spares: int
    ) -> list[int]:
        """The positions whose states a step stores, ascending: its end, the last boundary within a
        prompt's last chunk, and, as far as there are spare slots, the fork and the checkpoints."""
        size = self._rule.block_size
        wanted = [end]
        if completes:
            wanted.append((end - 1) // size * size)
        wanted.append(sequence.fork_block * size)
        every = self._every * size
        wanted += range((end - 1) // every * every, start, -every)
        fitting = dict.fromkeys(each for each in wanted if start < each <= end)
        return sorted(list(fitting)[:num_spares])

    def _keep(
        self, sequence: Sequence, table: BlockTable, ends: list[int], known: dict[int, int]
    ) -> None:
        """Let a table begin with the states at the positions `ends`, one position in each of
        successive blocks. Other slots that are cached, or that other sequences hold, are
        exchanged."""
        size = self._rule.block_size
        kept = [known[end] for end in ends]
        position = {slot: end for end, slot in known.items()}
        others = [slot for slot in table.blocks if slot not in kept]
        table.first = -(-ends[0] // size) - 1
        manager = self._manager
        exchanged = [each for each in others if manager.is_hashed(each) or manager.is_shared(each)]
        for slot in exchanged:
            block = position.get(slot, 0) // size - 1
            is_warm = self._is_checkpoint(sequence, block)
            manager.release([slot], not is_warm)
        fresh = manager.allocate(len(exchanged))
        table.blocks = kept + [slot for slot in others if slot not in exchanged] + fresh

    def _is_checkpoint(self, sequence: Sequence, block: int) -> bool:
        prompt_blocks = sequence.num_prompt // self._rule.block_size
        is_fork = block + 1 == sequence.fork_block
        return is_fork or self._rule.is_checkpoint(block, self._every, prompt_blocks)

    def _publish(self, sequence: Sequence, block: int, slot: int) -> None:
        hashes = sequence.hashes
        if block >= len(hashes):  # a simulation hashes only tokens that requests share
            return
        parent = hashes[block - 1] if block else None
        self._manager.publish(slot, hashes[block], parent, sequence.stays_in_pool)
