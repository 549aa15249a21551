"""Plans the next step: decodes first, then as much prefill as their latency allows.

Both roles, the simulator and the tests use this one class. The scheduler gets the time `now` and
returns the next batch; it reads no clock, does no IO and imports no torch. Only the scheduler
changes sequences' states and block tables.

Invariants:

- Every batch holds the decodes of all running sequences, except those whose grammar awaits a mask.
  These keep their blocks and hold up no other sequence.
- A sequence is admitted only with blocks for all its tokens. One with remote KV is admitted only
  when its source holds all of it, so that blocks here never wait for blocks there.
- A sequence fetches leading blocks from a peer's cache only once it has all its blocks, and takes
  no further memory meanwhile. It is never preempted, and nobody is told that it has begun.
- A preempted sequence waits ahead of younger ones, and after `max_preemptions` it is preempted only
  if no other sequence can be.

A batch may be planned while the previous one is under way, between `launched` and `landed`. The
plan counts the tokens of the step under way but does not know its outcome. Chunks that give no
token have no outcome: they are committed at their launch. Blocks that this step writes to are not
free: its sequences are not preempted, and the blocks of those that finish are released when the
step has landed.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from scheduling.batch import Batch, Chunk, Produced
from scheduling.block_manager import BlockManager
from scheduling.block_pools import BlockPools
from scheduling.decode_worker_shares import TargetShares
from scheduling.queues.admission import Admission, FetchChooser, fetch_nothing
from scheduling.queues.arriving_blocks import ExpectedBlocks
from scheduling.queues.growth import Growth
from scheduling.queues.roster import Roster
from scheduling.scheduler_config import SchedulerConfig as SchedulerConfig
from scheduling.sequence import Key, Sequence, SequenceState
from scheduling.sequence_blocks import SequenceBlocks
from scheduling.step_model import StepCost, StepModel
from scheduling.step_plan import StepPlan
from scheduling.turns import Turns


class Scheduler:
    """Owner of the sequences on a worker, from `add` to `finish`. The worker passes
    `choose_fetch`."""

    def __init__(
        self, config: SchedulerConfig, blocks: BlockManager | BlockPools, model: StepModel
    ) -> None:
        if isinstance(blocks, BlockManager):
            blocks = BlockPools.of_one(blocks, config.block_size)
        self.config = config
        self.pools = blocks
        self.blocks = blocks.managers[0]
        """The blocks of the first group, which are all if there is one group of layers."""
        self.model = model
        self.choose_fetch: FetchChooser = fetch_nothing
        self.tables = SequenceBlocks(blocks, config.chunk_max_tokens)
        """The blocks of its sequences."""
        self.shares = TargetShares(config.target_share * blocks.num_pages, self.tables)
        self.turns = Turns(config.aging_s)
        self.roster = Roster(config.block_size, self.tables)
        """The unfinished sequences, and how many there are; changed by the scheduler alone."""
        self._expected = ExpectedBlocks(config.block_size)
        self._admission = Admission(
            config,
            self.roster,
            self.tables,
            self.turns,
            self.shares,
            self._expected,
        )
        self._growth = Growth(self.roster, self.tables, self.turns, config.max_preemptions)
        self._leaving: set[Sequence] = set()
        self._in_steps: set[Sequence] = set()
        self._order = 0

    # -- the owner's interface --------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; ValueError if its tokens can never fit into the pool."""
        if not self.tables.can_ever_fit(sequence, sequence.most_tokens):
            raise ValueError(
                f"{sequence.most_tokens} tokens need "
                f"{self.tables.num_needed(sequence, sequence.most_tokens)} blocks, "
                f"the pool has {self.blocks.num_blocks}"
            )
        self._order += 1
        sequence.order = self._order
        self.tables.open_tables(sequence)
        self.roster.wait(sequence)

    def schedule(self, now: float) -> Batch:
        """The next batch. Finishes sequences past their deadline and releases their blocks.

        The batch computes nothing while running sequences need blocks that become free only when
        the step under way has landed.
        """
        self.blocks.retention.now = now
        expired = self._expire(now)
        if self.pools.has_windows:
            self.tables.slide(self.roster.prefilling.values())
            self.tables.slide(self.roster.running.values())
        ready, held = self._split_running(now)
        decodes, preempted = self._growth.grow(ready, self._preempt, bool(self._leaving))
        if decodes is None:
            return Batch(expired=expired, preempted=preempted, held=held)
        batch = Batch(decodes, expired=expired, preempted=preempted, held=held)
        if self.roster.prefilling or self.roster.waiting:
            step = StepPlan(batch, self._budget(decodes, now), self.config, self.model)
            self._continue_prefills(step)
            self._admission.admit(step, self.choose_fetch)
        else:
            self._admission.pause()
        self.tables.stage(batch)
        return batch

    def commit(self, batch: Batch, token_ids: Seq[int], now: float) -> list[Produced]:
        """Record a step that ran; `token_ids` belong to `batch.sampled`, in that order."""
        self.blocks.retention.now = now
        for chunk in batch.chunks:
            self._note_chunk(chunk)
            if chunk.completes:
                self.roster.move(chunk.sequence, SequenceState.RUNNING)
        for sequence in batch.decodes:
            sequence.num_computed += 1
            self.tables.publish(sequence)
        return [
            self._append(sequence, token_id, now)
            for sequence, token_id in zip(batch.sampled, token_ids, strict=True)
        ]

    def launched(self, batch: Batch) -> None:
        """The batch is under way. Plans count its tokens as computed until it has landed.

        Its chunks that give no token are committed: steps run in order, so later ones may read
        their blocks, and other sequences may share them.
        """
        self._in_steps.update(batch.sequences)
        for sequence in batch.sequences:
            sequence.num_steps += 1
        if self.pools.has_windows:
            for sequence in batch.decodes:
                sequence.unlanded.append(sequence.num_launched)
            for chunk in batch.chunks:
                chunk.sequence.unlanded.append(chunk.start)
        for sequence, num_tokens in batch.promised:
            sequence.num_ahead += num_tokens
        for chunk in batch.incomplete:
            self._note_chunk(chunk)

    def landed(self, batch: Batch) -> None:
        """The batch is no longer under way, whether or not it will be committed."""
        for sequence, num_tokens in batch.promised:
            sequence.num_ahead -= num_tokens
        for sequence in batch.sequences:
            sequence.num_steps -= 1
            if not sequence.num_steps:
                self._in_steps.discard(sequence)
            if sequence.unlanded:
                sequence.unlanded.pop(0)
            if sequence in self._leaving:
                self._leaving.discard(sequence)
                self.release_blocks(sequence)

    def arrived(self, sequence: Sequence, token_id: int, now: float) -> Produced:
        """Join a sequence to the batch: a peer has delivered every block and the first token."""
        assert sequence.state is SequenceState.RECEIVING
        sequence.num_computed = sequence.num_tokens
        self.tables.publish(sequence)
        self.roster.move(sequence, SequenceState.RUNNING)
        return self._append(sequence, token_id, now)

    def fetched(self, sequence: Sequence, num_blocks: int) -> None:
        """Note that a peer has delivered the next `num_blocks` blocks of a sequence. The sequence
        keeps fetching: `expect` or `fetch_over` follows."""
        assert sequence.state is SequenceState.FETCHING
        self._expected.forget(sequence)
        self.tables.fill_slots(sequence, num_blocks)
        sequence.num_computed += num_blocks * self.config.block_size
        sequence.num_fetched += num_blocks * self.config.block_size
        self.tables.publish(sequence)

    def slots(self, sequence: Sequence, num_blocks: int) -> list[list[int]] | None:
        """See `SequenceBlocks`."""
        return self.tables.slots(sequence, num_blocks)

    def expect(self, sequence: Sequence, num_blocks: int) -> None:
        """The next `num_blocks` blocks of a sequence are being fetched: sequences that need them
        wait for them."""
        self._expected.expect(sequence, num_blocks)

    def fetch_over(self, sequence: Sequence) -> None:
        """End a sequence's fetch: the rest of its prompt is computed."""
        self._expected.forget(sequence)
        self.roster.move(sequence, SequenceState.PREFILLING)
        self.turns.charge(sequence, max(sequence.num_remaining, self.config.block_size))

    def detach(self, sequence: Sequence, blocks: Collection[int], group: int = 0) -> None:
        """Take blocks that a peer may still write to out of a sequence that fetches and is about to
        leave or finish. The blocks belong to one group. They stay pinned; the caller releases
        them."""
        self._expected.forget(sequence)
        kept, table = set(blocks), sequence.tables[group]
        table.blocks = [each for each in table.blocks if each not in kept]

    def leave(self, sequence: Sequence) -> None:
        """Let a sequence that fetches wait again, with its old age. Releases the blocks that were
        not detached."""
        assert sequence.state is SequenceState.FETCHING
        self.roster.move(sequence, SequenceState.WAITING)
        self.release_blocks(sequence)
        sequence.num_computed = sequence.num_cached = sequence.num_fetched = 0
        sequence.num_published = 0
        self.roster.wait(sequence)

    def completed(self, sequence: Sequence, token_id: int, now: float) -> Produced:
        """End a waiting sequence with the token that a peer delivered: it completes the output, so
        the sequence needs no blocks."""
        assert sequence.state is SequenceState.WAITING
        return self._append(sequence, token_id, now)

    def finish(self, sequence: Sequence, release: bool = True) -> None:
        """End a sequence in any state. With `release` False its blocks stay pinned until
        `release_blocks`, because a peer still reads or writes them."""
        self._expected.forget(sequence)
        self.roster.move(sequence, SequenceState.FINISHED)
        if release:
            self.release_blocks(sequence)

    def release_blocks(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence that is finished or waiting; full ones stay cached.
        Blocks that a step under way may write to are released when that step has landed."""
        if sequence.num_steps:
            self._leaving.add(sequence)
            return
        self.shares.release(sequence)
        self.tables.release(sequence)
        if sequence.retention is not None and sequence.state is SequenceState.FINISHED:
            cached = self.blocks.match(sequence.hashes)
            self.blocks.retention.protect(cached, sequence.share, sequence.retention)

    def withdraw(self, sequence: Sequence) -> None:
        """Forget the hashes of a sequence's blocks, whose contents cannot be trusted."""
        self.tables.withdraw(sequence)

    def fits_beside(self, sequence: Sequence, *stuck: set[int]) -> bool:
        """Whether a waiting sequence can be admitted even if the blocks `stuck`, one set for each
        group, are never released."""
        return self.tables.fits_beside(sequence, stuck)

    def publish_arrived(self, sequence: Sequence, indices: Seq[int], group: int = 0) -> None:
        """Cache the individual blocks of a group that a peer delivered before its attempt
        failed."""
        for index in indices:
            if index < len(sequence.hashes):
                self.tables.publish_block(sequence, index, group)

    def find(self, key: Key) -> Sequence | None:
        """The sequence with this key; None if it is unknown or finished."""
        return self.roster.find(key)

    @property
    def sequences(self) -> list[Sequence]:
        """All unfinished sequences."""
        return list(self.roster)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return len(self.roster.waiting)

    @property
    def num_running(self) -> int:
        """Sequences with blocks: receiving, fetching, prefilling, decoding."""
        return self.roster.num_begun

    @property
    def blocks_used(self) -> int:
        """Blocks in use. With several groups, the pages in use, counted in blocks of the first
        group. `blocks.num_blocks` and the numbers of `roster` are counted in the same way."""
        return self.pools.in_blocks(self.pools.num_used)

    @property
    def most_tokens(self) -> int:
        """The most tokens of one sequence that the pool has room for."""
        return self.tables.most_tokens(self.config.block_size)

    def blocks_under_way(self, group: int = 0) -> set[int]:
        """Blocks of a group that steps under way may still be computing although `match` finds
        them: blocks of prompts, including prompts that have been ended since."""
        found: set[int] = set()
        for each in self._in_steps:
            if each.state is not SequenceState.RUNNING:
                landed = (each.num_cached + each.num_fetched) // self.config.block_size
                table = each.tables[group]
                found.update(table.blocks[max(0, landed - table.first) :])
        return found

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may return something to compute."""
        return bool(self.roster.running or self.roster.prefilling or self.roster.waiting)

    # -- steps of `schedule`, in order ------------------------------------------------------

    def _expire(self, now: float) -> list[Sequence]:
        """Finish sequences past their deadline. A peer may still use the blocks of receiving,
        fetching and prefill-only sequences; their owner releases these blocks."""
        expired = self.roster.expired(now)
        for sequence in expired:
            held = sequence.state in _WRITTEN_TO or sequence.prefill_only
            self.finish(sequence, release=not held)
        return expired

    def _split_running(self, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences that can decode, oldest first, and those that are held from now on
        because their grammar awaits a mask. Held sequences count as served now, so no step is
        shortened for their latency."""
        ready, held = [], []
        for sequence in self.turns.by_seniority(self.roster.running.values()):
            if sequence.grammar is None or not sequence.grammar.awaits_mask:
                sequence.is_held = False
                ready.append(sequence)
                continue
            if not sequence.is_held:
                held.append(sequence)
            sequence.is_held = True
            sequence.last_token_at = now
        return ready, held

    def _continue_prefills(self, step: StepPlan) -> None:
        for sequence in self.turns.by_seniority(self.roster.prefilling.values()):
            if sequence.num_launched == sequence.num_tokens or sequence.awaits_mask:
                continue  # the step under way completes it, or it awaits a mask
            most = self.tables.most_chunk_tokens(sequence)
            size = step.chunk_tokens(sequence, sequence.num_launched, most)
            if size == 0:
                break
            step.add(sequence, size)

    # -- helpers --------------------------------------------------------------------------

    def _budget(self, decodes: list[Sequence], now: float) -> float | None:
        """The seconds that this step may take, so that no running sequence exceeds the inter-token
        target and steps stay even. None: there is no limit."""
        limits = []
        if decodes:
            latest = min([sequence.last_token_at for sequence in decodes])
            limits.append(max(0.0, latest + self.config.itl_target_s - now))
        if self.config.even_steps:
            limits.append(self.model.predict(StepCost().plus(self.config.chunk_max_tokens, 0)))
        return min(limits, default=None)

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.prefill_only, f"{sequence.key}: a peer reads its blocks"
        self.roster.move(sequence, SequenceState.WAITING)
        self.release_blocks(sequence)
        sequence.num_computed = 0
        sequence.num_published = 0
        sequence.num_preemptions += 1
        sequence.remote = False
        self.roster.wait(sequence)

    def _note_chunk(self, chunk: Chunk) -> None:
        """Note a chunk that is computed, or will be before anything reads it. A later chunk may
        have been noted already."""
        sequence = chunk.sequence
        sequence.num_computed = max(sequence.num_computed, chunk.start + chunk.num_tokens)
        self.tables.publish(sequence)

    def _append(self, sequence: Sequence, token_id: int, now: float) -> Produced:
        """Add a token. Ends a finished sequence and releases its blocks unless a peer reads
        them."""
        index = sequence.num_output
        if sequence.prefill_only:  # the target needs no blocks outside the windows
            self.tables.slide([sequence])
        finish = sequence.append(token_id)
        self.turns.charge(sequence, 1)
        sequence.last_token_at = now
        if finish is not None or sequence.prefill_only:
            self.finish(sequence, release=not sequence.prefill_only)
        return Produced(sequence, index, token_id, finish)


_WRITTEN_TO = (SequenceState.RECEIVING, SequenceState.FETCHING)
