"""The blocks of sequences: their tables, which blocks stay in them, and which blocks are cached.

Only this module changes block tables. A sequence holds blocks for all its tokens in groups without
a window. In a windowed group it holds a fixed quota of blocks (`GroupRule.held`): a block that
leaves the window is exchanged for one for later tokens. So a sequence that has begun waits for no
memory until it has more tokens than it was admitted with.

A block leaves the window when no step under way reads it any more: the window's edge follows the
start of the oldest step that has not landed. Windowed groups cache the blocks before checkpoints
for as long as other groups' blocks. Checkpoints are the last two block boundaries of a sequence's
prompt and of its end, and one boundary every `checkpoint_blocks`. Other blocks that leave a window
are evicted first. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduling.batch import Batch
from scheduling.block_pools import BlockPools, Prefix
from scheduling.group_rule import GroupRule
from scheduling.large_pages import GroupBlocks
from scheduling.sequence import BlockTable, Sequence, SequenceState
from scheduling.states.rule import StateRule
from scheduling.states.sequence_states import SequenceStates


class SequenceBlocks:
    """The blocks of all sequences on a worker. A step computes up to `chunk_max` tokens of a
    sequence."""

    def __init__(self, pools: BlockPools, chunk_max: int) -> None:
        self.pools = pools
        self._chunk_max = chunk_max
        self._is_plain = pools.is_plain
        self._groups = list(zip(range(len(pools.rules)), pools.managers, pools.rules, strict=True))
        self._windowed = [
            (index, manager, rule)
            for index, manager, rule in self._groups
            if rule.window is not None and isinstance(manager, GroupBlocks)
        ]
        self._sliding = [each for each in self._windowed if not isinstance(each[2], StateRule)]
        self._states = {
            index: SequenceStates(index, manager, rule, pools.checkpoint_blocks)
            for index, manager, rule in self._windowed
            if isinstance(rule, StateRule)
        }

    def pages_for(self, sequence: Sequence, num_tokens: int) -> int:
        """Number of pages that the sequence holds while it computes up to `num_tokens` tokens, if
        it shares none with others."""
        num_blocks = sequence.blocks_for(num_tokens)
        if self._is_plain:
            return num_blocks
        step = self._step_tokens(sequence)
        return self.pools.pages_for(rule.held(num_blocks, step) for rule in self.pools.rules)

    def num_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """The memory that the sequence needs for `num_tokens` tokens, in blocks of the first
        group."""
        return self.pools.in_blocks(self.pages_for(sequence, num_tokens))

    def num_held(self, sequence: Sequence) -> int:
        """The memory that the sequence holds, in blocks of the first group."""
        if self._is_plain:
            return len(sequence.tables[0].blocks)
        counts = (len(table.blocks) for table in sequence.tables)
        return self.pools.in_blocks(self.pools.pages_for(counts))

    def fits_beside(self, sequence: Sequence, stuck: Iterable[set[int]]) -> bool:
        """Whether an idle pool has room for a waiting sequence, even if the blocks `stuck`, by
        group, are never released."""
        groups = list(zip(stuck, self.pools.rules, strict=False))
        lost = sum(len({block // rule.blocks_per_page for block in each}) for each, rule in groups)
        room = self.pools.num_pages - lost
        needed = self.pages_for(sequence, sequence.num_tokens)
        if needed <= room:
            return True
        cached = self.usable_prefix(sequence).blocks
        held = [
            sum(block in each for block in blocks) // rule.blocks_per_page
            for (each, rule), blocks in zip(groups, cached, strict=False)
        ]
        return needed - sum(held) <= room

    def can_ever_fit(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether an idle pool has room for `num_tokens` tokens of the sequence, computed here."""
        num_blocks = sequence.blocks_for(num_tokens)
        if self._is_plain:
            return num_blocks <= self.pools.num_pages
        held = (rule.held(num_blocks, self._chunk_max) for rule in self.pools.rules)
        return self.pools.pages_for(held) <= self.pools.num_pages

    def most_tokens(self, block_size: int) -> int:
        """The most tokens of one sequence that an idle pool has room for."""
        low, high = 0, self.pools.in_blocks(self.pools.num_pages) + 1
        if self._windowed and len(self._windowed) == len(self._groups):
            high = 1 << 40  # all groups have windows: any length fits, or none beyond the quota
        while high - low > 1:
            middle = (low + high) // 2
            held = (rule.held(middle, self._chunk_max) for rule in self.pools.rules)
            if self.pools.pages_for(held) <= self.pools.num_pages:
                low = middle
            else:
                high = middle
        return low * block_size

    def open_tables(self, sequence: Sequence) -> None:
        """Give a sequence an empty table for each group."""
        sequence.tables = [BlockTable() for _ in self._groups]

    def usable_prefix(self, sequence: Sequence) -> Prefix:
        """The cached prefix after which a sequence can continue.

        A local sequence has to compute at least its last token to get logits, or all tokens if
        the prompt's logits are needed. A remote sequence gets its first token and log-probabilities
        from the peer, so all its blocks may match.
        """
        if sequence.needs_prompt_logits and not sequence.remote:
            return self.pools.nothing
        usable = sequence.num_tokens if sequence.remote else sequence.num_tokens - 1
        return self.pools.match(sequence.hashes[: usable // sequence.block_size])

    def try_take(self, sequence: Sequence, prefix: Prefix, headroom: int) -> bool:
        """Pin the prefix and allocate the rest of what the sequence has to hold; keeps `headroom`
        blocks of the first group free for the sequences that decode.

        A sequence that may fetch also gets blocks for a whole cover after its prefix, if there is
        room. Where a few blocks of a prefix may occupy many pages, the sequence forgoes the prefix
        if it does not fit with it, or if it lacked memory before.
        """
        if not self._windowed and not self.pools.has_shared_pages:
            return self._try_prefix(sequence, prefix, headroom)
        if not (self.pools.has_shared_pages and sequence.num_preemptions):
            if sequence.holders is not None and self._try_prefix(sequence, prefix, headroom, True):
                return True
            if self._try_prefix(sequence, prefix, headroom):
                return True
        return self._try_prefix(sequence, self.pools.nothing, headroom)

    def try_grow(self, sequence: Sequence) -> bool:
        """Allocate what the sequence's newest token, which may be under way, needs; False if there
        is no room."""
        needed = sequence.blocks_for(sequence.num_tokens + sequence.num_ahead)
        for table, manager in zip(sequence.tables, self.pools.managers, strict=True):
            while table.end < needed:
                if not manager.num_free:
                    return False
                table.blocks += manager.allocate(1)
        return True

    def lacks_room(self, sequence: Sequence) -> bool:
        """Whether the newest token, which may be under way, needs one more block."""
        num_tokens, size = len(sequence.tokens) + sequence.num_ahead, sequence.block_size
        for table in sequence.tables:
            if (table.first + len(table.blocks)) * size < num_tokens:
                return True
        return False

    def most_chunk_tokens(self, sequence: Sequence) -> int:
        """How many tokens after the launched ones the sequence has blocks for."""
        tables = enumerate(sequence.tables)
        end = min(table.end for index, table in tables if index not in self._states)
        return end * sequence.block_size - sequence.num_launched

    def slide(self, sequences: Iterable[Sequence]) -> None:
        """Give back the blocks of these sequences that have left their windows, and take as many
        blocks for later tokens, as far as the sequences will need them."""
        for sequence in sequences if self._windowed else ():
            for index, manager, rule in self._sliding:
                self._slide(sequence, sequence.tables[index], manager, rule)
            for states in self._states.values():
                states.trim(sequence, self._step_tokens(sequence))

    def stage(self, batch: Batch) -> None:
        """Choose the slots of states that a planned step reads and writes."""
        for states in self._states.values():
            for sequence in batch.decodes:
                states.stage(sequence, sequence.num_launched, 1, completes=False)
            for chunk in batch.chunks:
                states.stage(chunk.sequence, chunk.start, chunk.num_tokens, chunk.completes)

    def slots(self, sequence: Sequence, num_blocks: int) -> list[list[int]] | None:
        """By group, the blocks to fetch into, so that the group can continue after the next
        `num_blocks` blocks of a sequence: one for each of these, or at most as many as its window
        reaches back. None if the sequence lacks some."""
        start = sequence.num_computed // sequence.block_size
        slots = []
        for table, (_, needed) in zip(
            sequence.tables, self.pools.needed(start, start + num_blocks), strict=True
        ):
            at = start - table.first
            slots.append(table.blocks[at : at + len(needed)])
            if len(slots[-1]) < len(needed):
                return None
        return slots

    def fill_slots(self, sequence: Sequence, num_blocks: int) -> None:
        """Note that the next `num_blocks` blocks of a sequence were fetched. The slots now hold the
        blocks that windows see from their end; the blocks that the windows held before leave
        them."""
        start = sequence.num_computed // sequence.block_size
        for index, manager, rule in self._windowed:
            table = sequence.tables[index]
            first = start + num_blocks - min(rule.cover, num_blocks)
            if first == start:
                continue
            if index in self._states:
                slot = table.blocks[start - table.first]
                self._states[index].jump(sequence, first, slot)
                continue
            num_out = start - table.first
            out, table.blocks = table.blocks[:num_out], table.blocks[num_out:]
            table.first = first
            manager.release(out)
            room = max(0, self._last_block(sequence) - table.end)
            table.blocks += manager.allocate(min(num_out, room))

    def publish(self, sequence: Sequence) -> None:
        """Cache the sequence's blocks that are full and computed."""
        for states in self._states.values():
            states.advance(sequence)
        complete = min(sequence.num_computed // sequence.block_size, len(sequence.hashes))
        if complete <= sequence.num_published:
            return
        for index in range(sequence.num_published, complete):
            for group in range(len(self._groups)):
                self.publish_block(sequence, index, group)
        sequence.num_published = complete

    def publish_block(self, sequence: Sequence, index: int, group: int = 0) -> None:
        """Cache one block of the sequence in one group, if its table has that block."""
        hashes, table = sequence.hashes, sequence.tables[group]
        if not table.first <= index < table.end:
            return
        parent = hashes[index - 1] if index else None
        block = table.blocks[index - table.first]
        manager = self.pools.managers[group]
        manager.publish(block, hashes[index], parent, sequence.stays_in_pool)

    def withdraw(self, sequence: Sequence) -> None:
        """Forget the hashes of all the sequence's blocks, including those that have left its
        windows, because their contents cannot be trusted."""
        for table, manager in zip(sequence.tables, self.pools.managers, strict=True):
            manager.withdraw(table.blocks, sequence.hashes[: table.end])
            manager.forget(sequence.hashes[: table.first])

    def release(self, sequence: Sequence) -> None:
        """Release the sequence's blocks; full ones stay cached. Blocks that stay cached for its
        windows are evicted after those of the groups without a window."""
        for table, manager in zip(sequence.tables, self.pools.managers, strict=True):
            manager.release(table.blocks)
        if self._windowed:
            self._touch_checkpoints(sequence)
        self.open_tables(sequence)
        sequence.state_step = None

    def _try_prefix(
        self, sequence: Sequence, prefix: Prefix, headroom: int, may_fetch: bool = False
    ) -> bool:
        num_blocks = sequence.blocks_for(sequence.num_tokens)
        if self._is_plain:
            wanted = [num_blocks - prefix.num_blocks]
            if not self.pools.fits(prefix, wanted, headroom):
                return False
            blocks = prefix.blocks[0] + self.pools.take(prefix, wanted)[0]
            self._begin_after(sequence, prefix, [BlockTable(blocks)])
            return True
        step = self._step_tokens(sequence)
        firsts, used, wanted = [], [], []
        for (_, _, rule), blocks in zip(self._groups, prefix.blocks, strict=True):
            covered = rule.covers_from(prefix.num_blocks)
            first = covered
            if sequence.remote:  # as much as its source keeps
                first = max(first, rule.covers_from(sequence.num_tokens // sequence.block_size))
            cached = blocks[first - covered :]
            firsts.append(first)
            used.append(cached)
            fresh = rule.held(num_blocks - first, step) - len(cached)
            if may_fetch and rule.window is not None:
                fresh = max(fresh, min(rule.cover, num_blocks - prefix.num_blocks))
            wanted.append(fresh)
        kept = Prefix(prefix.num_blocks, tuple(used))
        if not self.pools.fits(kept, wanted, headroom):
            return False
        taken = self.pools.take(kept, wanted)
        parts = zip(used, taken, firsts, strict=True)
        tables = [BlockTable(cached + more, first) for cached, more, first in parts]
        self._begin_after(sequence, prefix, tables)
        return True

    @staticmethod
    def _begin_after(sequence: Sequence, prefix: Prefix, tables: list[BlockTable]) -> None:
        """Give a sequence the tables of its blocks, of which the prefix is computed."""
        sequence.tables = tables
        sequence.num_computed = sequence.num_cached = prefix.num_blocks * sequence.block_size
        sequence.num_fetched, sequence.fork_block = 0, prefix.num_full
        sequence.num_published = prefix.num_blocks

    def _slide(
        self, sequence: Sequence, table: BlockTable, manager: GroupBlocks, rule: GroupRule
    ) -> None:
        """See `slide`. A block that leaves is exchanged, so there is always another one to take."""
        landed = min(sequence.unlanded, default=sequence.num_computed)
        num_out = rule.kept_from(landed) - table.first
        if num_out > 0:
            self._leave(sequence, table, manager, rule, num_out)
        needed = sequence.blocks_for(sequence.num_tokens + sequence.num_ahead)
        rest = self._last_block(sequence) - table.first
        held = rule.held(max(rest, 0), self._step_tokens(sequence))
        held = max(held, min(needed, table.end) - table.first)
        if len(table.blocks) > held:
            manager.release(table.blocks[held:])
            del table.blocks[held:]
        elif num_out > 0:
            count = min(num_out, held - len(table.blocks))
            is_compact = sequence.num_preemptions > 0
            table.blocks += manager.reuse(count) if is_compact else manager.allocate(count)

    def _leave(
        self,
        sequence: Sequence,
        table: BlockTable,
        manager: GroupBlocks,
        rule: GroupRule,
        num_out: int,
    ) -> None:
        """Release the first `num_out` blocks of a table: those of checkpoints stay cached."""
        out, table.blocks = table.blocks[:num_out], table.blocks[num_out:]
        kept = [self._is_checkpoint(sequence, rule, table.first + at) for at in range(num_out)]
        table.first += num_out
        manager.release([block for block, keep in zip(out, kept, strict=True) if not keep], True)
        manager.release([block for block, keep in zip(out, kept, strict=True) if keep])

    def _is_checkpoint(self, sequence: Sequence, rule: GroupRule, block: int) -> bool:
        """Whether a windowed group needs this block to continue after a checkpoint."""
        prompt_blocks = sequence.num_prompt // sequence.block_size
        return rule.is_checkpoint(block, self.pools.checkpoint_blocks, prompt_blocks)

    def _touch_checkpoints(self, sequence: Sequence) -> None:
        """Let the checkpoints that a sequence's window has passed be evicted as late as its own
        blocks."""
        every, hashes = self.pools.checkpoint_blocks, sequence.hashes[: sequence.num_published]
        end = min(sequence.num_prompt // sequence.block_size, len(hashes))
        for _, manager, rule in self._windowed:
            for boundary in range(every, len(hashes) + 1, every):
                manager.touch(hashes[rule.covers_from(boundary) : boundary])
            manager.touch(hashes[rule.covers_from(max(0, end - 1)) : end])

    def _step_tokens(self, sequence: Sequence) -> int:
        """The most tokens of a sequence in a step."""
        decodes = sequence.remote or sequence.state is SequenceState.RUNNING
        return 1 if decodes else self._chunk_max

    def _last_block(self, sequence: Sequence) -> int:
        """The number of blocks that the sequence will have in the end, at most."""
        return sequence.blocks_for(sequence.most_tokens)
