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

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from scheduling.batch import Batch, Chunk, Produced
from scheduling.block_manager import BlockManager
from scheduling.expected_blocks import ExpectedBlocks
from scheduling.overtaking import Overtaking
from scheduling.sequence import Key, Sequence, SequenceState
from scheduling.step_model import StepCost, StepModel
from scheduling.step_plan import StepPlan
from scheduling.target_shares import TargetShares
from scheduling.turns import Turns
from scheduling.waiting_work import WaitingWork


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step.

    - `prompt_max_tokens`: no chunk has more; None: no limit but `chunk_max_tokens`, which all
      chunks of a step have together.
    - `even_steps`: steps take no longer than one of `chunk_max_tokens` without context, so that
      the stages of a pipeline do not wait for one another.
    - `itl_target_s`: prefill must keep the inter-token latency below it.
    - `target_share`: the part of the pool that `TargetShares` allows for one target.
    - `aging_s`: the waiting time that is worth one step of priority.
    """

    block_size: int
    max_batch_size: int = 64
    chunk_min_tokens: int = 16
    chunk_max_tokens: int = 512
    itl_target_s: float = 0.05
    headroom_per_sequence: int = 1
    max_preemptions: int = 3
    target_share: float = 0.5
    aging_s: float = 3.0
    prompt_max_tokens: int | None = None
    even_steps: bool = False

    def __post_init__(self) -> None:
        for name in ("chunk_min_tokens", "chunk_max_tokens", "prompt_max_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < self.block_size:
                raise ValueError(f"{name} must be at least the block size, {self.block_size}")


FetchChooser = Callable[[Sequence, int], int | None]
"""How many blocks of a sequence with `holders` to fetch behind this many cached ones: 0 for none,
None if it cannot be decided yet. It is called when the sequence could be admitted."""


def _fetch_nothing(_sequence: Sequence, _num_cached: int) -> int:
    return 0


class Scheduler:
    """Owner of the sequences on a worker, from `add` to `finish`. `choose_fetch` is the owner's."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, model: StepModel) -> None:
        self.config = config
        self.blocks = blocks
        self.model = model
        self.shares = TargetShares(config.target_share * blocks.num_blocks)
        self.turns = Turns(config.aging_s)
        self._waiting: dict[Key, Sequence] = {}
        self._work = WaitingWork(config.block_size)
        self.choose_fetch: FetchChooser = _fetch_nothing
        self._receiving: dict[Key, Sequence] = {}
        self._fetching: dict[Key, Sequence] = {}
        self._expected = ExpectedBlocks(config.block_size)
        self._prefilling: dict[Key, Sequence] = {}
        self._running: dict[Key, Sequence] = {}
        self._leaving: set[Sequence] = set()
        self._in_steps: set[Sequence] = set()
        self._order = 0

    # -- the owner's interface --------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; ValueError if its tokens can never fit into the pool."""
        longest = sequence.num_tokens
        if not sequence.prefill_only:
            longest = sequence.num_prompt + sequence.sampling.max_tokens
        if sequence.blocks_for(longest) > self.blocks.num_blocks:
            raise ValueError(
                f"{longest} tokens need {sequence.blocks_for(longest)} blocks, "
                f"the pool has {self.blocks.num_blocks}"
            )
        self._order += 1
        sequence.order = self._order
        self._wait(sequence)

    def schedule(self, now: float) -> Batch:
        """The next batch. Finishes sequences past their deadline and releases their blocks.

        The batch computes nothing while running sequences need blocks that become free only when
        the step under way has landed.
        """
        self.blocks.retention.now = now
        expired = self._expire(now)
        ready, held = self._split_running(now)
        decodes, preempted = self._grow(ready)
        if decodes is None:
            return Batch(expired=expired, preempted=preempted, held=held)
        cost, budget_s = Batch(decodes=decodes).cost, self._budget(decodes, now)
        step = StepPlan(cost, budget_s, self.config, self.model)
        self._continue_prefills(step)
        self._admit(step)
        return Batch(decodes, step.chunks, step.received, expired, preempted, held, step.fetching)

    def commit(self, batch: Batch, token_ids: Seq[int], now: float) -> list[Produced]:
        """Record a step that ran; `token_ids` belong to `batch.sampled`, in that order."""
        self.blocks.retention.now = now
        for chunk in batch.chunks:
            self._note_chunk(chunk)
            if chunk.completes:
                self._move(chunk.sequence, SequenceState.RUNNING)
        for sequence in batch.decodes:
            sequence.num_computed += 1
            self._publish(sequence)
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
            if sequence in self._leaving:
                self._leaving.discard(sequence)
                self.release_blocks(sequence)

    def arrived(self, sequence: Sequence, token_id: int, now: float) -> Produced:
        """Join a sequence to the batch: a peer has delivered every block and the first token."""
        assert sequence.state is SequenceState.RECEIVING
        sequence.num_computed = sequence.num_tokens
        self._publish(sequence)
        self._move(sequence, SequenceState.RUNNING)
        return self._append(sequence, token_id, now)

    def fetched(self, sequence: Sequence, num_blocks: int) -> None:
        """Note the next `num_blocks` blocks of a sequence, which a peer has delivered. It still
        fetches: `expect` or `fetch_over` follows."""
        assert sequence.state is SequenceState.FETCHING
        self._expected.forget(sequence)
        sequence.num_computed += num_blocks * self.config.block_size
        sequence.num_fetched += num_blocks * self.config.block_size
        self._publish(sequence)

    def expect(self, sequence: Sequence, num_blocks: int) -> None:
        """The next `num_blocks` blocks of a sequence are being fetched: sequences that need them
        wait for them."""
        self._expected.expect(sequence, num_blocks)

    def fetch_over(self, sequence: Sequence) -> None:
        """Compute what a sequence that has fetched still lacks."""
        self._expected.forget(sequence)
        self._move(sequence, SequenceState.PREFILLING)
        self.turns.charge(sequence, max(sequence.num_remaining, self.config.block_size))

    def detach(self, sequence: Sequence, blocks: Collection[int]) -> None:
        """Take blocks that a peer may still write to out of a sequence that fetches, and is about
        to leave or to finish. They stay pinned; the caller releases them."""
        self._expected.forget(sequence)
        kept = set(blocks)
        sequence.block_table = [each for each in sequence.block_table if each not in kept]

    def leave(self, sequence: Sequence) -> None:
        """Let a sequence that fetches wait again, with its old age; the blocks that were not
        detached are released."""
        assert sequence.state is SequenceState.FETCHING
        self._move(sequence, SequenceState.WAITING)
        self.release_blocks(sequence)
        sequence.num_computed = sequence.num_cached = sequence.num_fetched = 0
        sequence.num_published = 0
        self._wait(sequence)

    def completed(self, sequence: Sequence, token_id: int, now: float) -> Produced:
        """End a waiting sequence with the token that a peer delivered: it completes the output, so
        the sequence needs no blocks."""
        assert sequence.state is SequenceState.WAITING
        return self._append(sequence, token_id, now)

    def finish(self, sequence: Sequence, release: bool = True) -> None:
        """End a sequence in any state. With `release` False its blocks stay pinned until
        `release_blocks`, because a peer still reads or writes them."""
        self._expected.forget(sequence)
        self._move(sequence, SequenceState.FINISHED)
        if release:
            self.release_blocks(sequence)

    def release_blocks(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence that is finished or waiting; full ones stay cached.
        Blocks that a step under way may write to are released when that step has landed."""
        if sequence.num_steps:
            self._leaving.add(sequence)
            return
        self.shares.release(sequence)
        self.blocks.release(sequence.block_table)
        sequence.block_table = []
        if sequence.retention is not None and sequence.state is SequenceState.FINISHED:
            cached = self.blocks.match(sequence.hashes)
            self.blocks.retention.protect(cached, sequence.share, sequence.retention)

    def fits_beside(self, sequence: Sequence, stuck: set[int]) -> bool:
        """Whether a waiting sequence can be admitted even if the blocks `stuck` never return."""
        room = self.blocks.num_blocks - len(stuck)
        needed = sequence.blocks_for(sequence.num_tokens)
        if needed <= room:
            return True
        return needed - sum(block in stuck for block in self._usable_prefix(sequence)) <= room

    def publish_arrived(self, sequence: Sequence, indices: Seq[int]) -> None:
        """Cache the individual blocks that a peer delivered before its attempt failed."""
        for index in indices:
            if index < len(sequence.hashes):
                self._publish_block(sequence, index)

    def find(self, key: Key) -> Sequence | None:
        """The sequence with this key; None if it is unknown or finished."""
        for group in self._groups():
            if key in group:
                return group[key]
        return None

    @property
    def sequences(self) -> list[Sequence]:
        """All unfinished sequences."""
        return [sequence for group in self._groups() for sequence in group.values()]

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with blocks: receiving, fetching, prefilling, decoding."""
        begun = len(self._receiving) + len(self._fetching) + len(self._prefilling)
        return begun + len(self._running)

    @property
    def num_held_up(self) -> int:
        """Number of waiting sequences that need only room or time here."""
        return sum(
            each.source_has_begun if each.remote else each.is_ready
            for each in self._waiting.values()
        )

    @property
    def blocks_granted(self) -> int:
        """Blocks of sequences whose KV a peer is writing."""
        received = sum(len(each.block_table) for each in self._receiving.values())
        return received + sum(each.num_expected for each in self._fetching.values())

    @property
    def blocks_waiting(self) -> int:
        """Blocks that the waiting sequences will need, cached ones included."""
        return self._work.num_blocks

    @property
    def queued_tokens(self) -> int:
        """Tokens that this worker still has to prefill."""
        begun = sum(sequence.num_remaining for sequence in self._prefilling.values())
        for each in self._fetching.values():
            begun += each.num_remaining - each.num_expected * self.config.block_size
        return self._work.num_tokens + begun

    def blocks_under_way(self) -> set[int]:
        """Blocks that steps under way may still be computing although `match` finds them: those of
        prompts, also of prompts whose owner has ended them since."""
        found: set[int] = set()
        for each in self._in_steps:
            if each.state is not SequenceState.RUNNING:
                landed = (each.num_cached + each.num_fetched) // self.config.block_size
                found.update(each.block_table[landed:])
        return found

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may return something to compute."""
        return bool(self._running or self._prefilling or self._waiting)

    # -- steps of `schedule`, in order ------------------------------------------------------

    def _expire(self, now: float) -> list[Sequence]:
        """Finish sequences past their deadline. A peer may still use the blocks of receiving,
        fetching and prefill-only sequences; their owner releases these blocks."""
        expired = [s for group in self._groups() for s in group.values() if s.deadline <= now]
        for sequence in expired:
            held = sequence.state in _WRITTEN_TO or sequence.prefill_only
            self.finish(sequence, release=not held)
        return expired

    def _split_running(self, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences that can decode, oldest first, and those that are held from now on
        because their grammar awaits a mask. Held ones count as served, so no step hurries for
        them."""
        ready, held = [], []
        for sequence in sorted(self._running.values(), key=self.turns.seniority):
            if not sequence.awaits_mask:
                sequence.is_held = False
                ready.append(sequence)
                continue
            if not sequence.is_held:
                held.append(sequence)
            sequence.is_held = True
            sequence.last_token_at = now
        return ready, held

    def _grow(self, running: list[Sequence]) -> tuple[list[Sequence] | None, list[Sequence]]:
        """Allocate a block for each running sequence whose next token needs one, oldest first. If
        none is free, preempt the youngest sequence.

        Returns the sequences that decode and those that were preempted. The former is None if the
        victim is in the step under way, or if blocks become free when that step has landed.
        """
        preempted: list[Sequence] = []
        for sequence in running:
            while sequence.state is SequenceState.RUNNING and _lacks_room(sequence):
                if self.blocks.num_free > 0:
                    sequence.block_table += self.blocks.allocate(1)
                    continue
                victim = self._victim()
                if victim.num_steps or self._leaving:
                    return None, preempted
                self._preempt(victim)
                preempted.append(victim)
        left = [sequence for sequence in running if sequence.state is SequenceState.RUNNING]
        return [sequence for sequence in left if not _is_ending(sequence)], preempted

    def _continue_prefills(self, step: StepPlan) -> None:
        for sequence in sorted(self._prefilling.values(), key=self.turns.seniority):
            if sequence.num_launched == sequence.num_tokens or sequence.awaits_mask:
                continue  # the step under way completes it, or it awaits a mask
            size = step.chunk_tokens(sequence, sequence.num_launched)
            if size == 0:
                break
            step.add(sequence, size)

    def _admit(self, step: StepPlan) -> None:
        """Admit sequences in turn, each with all its blocks. One that does not fit lets only small
        ones pass, see `Overtaking`.

        A local sequence without any budget left holds up later local sequences, but not remote
        ones, which need no budget. These sequences hold up no others: one whose grammar is still
        being compiled, a remote one whose source has not begun, and one whose target already has
        its share of the pool (younger ones for that target wait behind it), one whose next block
        another is fetching here, and one that may fetch from a peer that has not answered yet.
        """
        if self.num_running >= self.config.max_batch_size:
            return
        budget_left = True
        full_targets: set[str] = set()
        overtaking = Overtaking()
        for sequence in self.turns.in_turn(self._waiting.values()):
            if self.num_running >= self.config.max_batch_size or overtaking.is_over:
                break
            if not _may_begin(sequence, budget_left):
                continue
            if sequence.target in full_targets or not overtaking.may_pass(sequence):
                continue
            cached = self._usable_prefix(sequence)
            if self._expected.have_next_of(sequence, len(cached)):
                continue
            if self.shares.exceeds(sequence, cached):
                full_targets.add(sequence.target)
                continue
            num_fetched = self._num_to_fetch(sequence, len(cached))
            if num_fetched is None:
                continue
            size = 0
            if not sequence.remote and not num_fetched:
                start = len(cached) * self.config.block_size
                size = step.chunk_tokens(sequence, start) if budget_left else 0
                if size == 0:
                    budget_left = False
                    continue
            if not self._try_take_blocks(sequence, cached):
                overtaking.block(sequence)
                continue
            overtaking.passed(sequence)
            self._begin(step, sequence, size, num_fetched)

    def _begin(self, step: StepPlan, sequence: Sequence, size: int, num_fetched: int) -> None:
        """Receive, fetch or compute for a sequence that has its blocks. One that fetches is charged
        for what it computes when it has fetched."""
        charge = max(sequence.num_remaining, self.config.block_size)
        if sequence.remote:
            self._move(sequence, SequenceState.RECEIVING)
            step.received.append(sequence)
        elif num_fetched:
            self._move(sequence, SequenceState.FETCHING)
            self.expect(sequence, num_fetched)
            step.fetching.append(sequence)
            charge = 0
        else:
            self._move(sequence, SequenceState.PREFILLING)
            step.add(sequence, size)
        self.shares.admit(sequence)
        self.turns.admit(sequence, charge)

    # -- helpers --------------------------------------------------------------------------

    def _budget(self, decodes: list[Sequence], now: float) -> float | None:
        """The seconds that this step may take: before a running sequence exceeds the inter-token
        target, and as long as even steps take. None: any."""
        limits = []
        if decodes:
            latest = min(sequence.last_token_at for sequence in decodes)
            limits.append(max(0.0, latest + self.config.itl_target_s - now))
        if self.config.even_steps:
            limits.append(self.model.predict(StepCost().plus(self.config.chunk_max_tokens, 0)))
        return min(limits, default=None)

    def _usable_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the sequence's prefix.

        A local sequence has to compute at least its last token to get logits, or all tokens if
        the prompt's logits are needed. A remote sequence gets its first token and log-probabilities
        from the peer, so all its blocks may match.
        """
        if sequence.needs_prompt_logits and not sequence.remote:
            return []
        usable = sequence.num_tokens if sequence.remote else sequence.num_tokens - 1
        return self.blocks.match(sequence.hashes[: usable // self.config.block_size])

    def _try_take_blocks(self, sequence: Sequence, cached: list[int]) -> bool:
        """Pin the prefix and allocate the rest; keeps headroom for the sequences that decode."""
        wanted = sequence.blocks_for(sequence.num_tokens) - len(cached)
        headroom = self.config.headroom_per_sequence * len(self._running)
        if self.blocks.num_free_after_pinning(cached) < wanted + headroom:
            return False
        self.blocks.pin(cached)
        sequence.block_table = cached + self.blocks.allocate(wanted)
        sequence.num_computed = sequence.num_cached = len(cached) * self.config.block_size
        sequence.num_fetched = 0
        sequence.num_published = len(cached)
        return True

    def _num_to_fetch(self, sequence: Sequence, num_cached: int) -> int | None:
        """See `FetchChooser`."""
        if sequence.holders is None or sequence.remote:
            return 0
        return self.choose_fetch(sequence, num_cached)

    def _victim(self) -> Sequence:
        """The sequence to preempt: the least senior of those below `max_preemptions`, or of all if
        there are none.

        The most senior sequence is chosen last, so at least one always makes progress. Prompts that
        end here are never chosen, because a peer reads their blocks.
        """
        started = (*self._prefilling.values(), *self._running.values())
        candidates = [sequence for sequence in started if not sequence.prefill_only]
        assert candidates, "the sequence that lacks a block can be preempted itself"
        immune = self.config.max_preemptions
        return max(candidates, key=lambda s: (s.num_preemptions < immune, self.turns.seniority(s)))

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.prefill_only, f"{sequence.key}: a peer reads its blocks"
        self._move(sequence, SequenceState.WAITING)
        self.release_blocks(sequence)
        sequence.num_computed = 0
        sequence.num_published = 0
        sequence.num_preemptions += 1
        sequence.remote = False
        self._wait(sequence)

    def _note_chunk(self, chunk: Chunk) -> None:
        """Note a chunk that is computed, or will be in time. A later one may be known already."""
        sequence = chunk.sequence
        sequence.num_computed = max(sequence.num_computed, chunk.start + chunk.num_tokens)
        self._publish(sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Cache the sequence's blocks that are full and computed."""
        complete = min(sequence.num_computed // self.config.block_size, len(sequence.hashes))
        for index in range(sequence.num_published, complete):
            self._publish_block(sequence, index)
        sequence.num_published = max(sequence.num_published, complete)

    def _publish_block(self, sequence: Sequence, index: int) -> None:
        hashes = sequence.hashes
        parent = hashes[index - 1] if index else None
        block = sequence.block_table[index]
        self.blocks.publish(block, hashes[index], parent, sequence.stays_in_pool)

    def _append(self, sequence: Sequence, token_id: int, now: float) -> Produced:
        """Add a token. Ends a finished sequence and releases its blocks unless a peer reads
        them."""
        index = sequence.num_output
        finish = sequence.append(token_id)
        self.turns.charge(sequence, 1)
        sequence.last_token_at = now
        if finish is not None or sequence.prefill_only:
            self.finish(sequence, release=not sequence.prefill_only)
        return Produced(sequence, index, token_id, finish)

    def _wait(self, sequence: Sequence) -> None:
        self._waiting[sequence.key] = sequence
        self._work.add(sequence, len(self._usable_prefix(sequence)))

    def _move(self, sequence: Sequence, state: SequenceState) -> None:
        if sequence.state is SequenceState.WAITING:
            self._work.remove(sequence)
        for group in self._groups():
            group.pop(sequence.key, None)
        sequence.transition(state)
        target = {
            SequenceState.RECEIVING: self._receiving,
            SequenceState.FETCHING: self._fetching,
            SequenceState.PREFILLING: self._prefilling,
            SequenceState.RUNNING: self._running,
        }.get(state)
        if target is not None:
            target[sequence.key] = sequence

    def _groups(self) -> tuple[dict[Key, Sequence], ...]:
        return (self._running, self._prefilling, self._fetching, self._receiving, self._waiting)


_WRITTEN_TO = (SequenceState.RECEIVING, SequenceState.FETCHING)


def _may_begin(sequence: Sequence, budget_left: bool) -> bool:
    """Whether a waiting sequence needs only blocks. Without budget it may receive or fetch."""
    if sequence.remote:
        return sequence.source_has_begun
    return sequence.is_ready and (budget_left or sequence.is_hinted)


def _lacks_room(sequence: Sequence) -> bool:
    """Whether the newest token, which may be under way, needs one more block."""
    needed = sequence.blocks_for(sequence.num_tokens + sequence.num_ahead)
    return len(sequence.block_table) < needed and not _is_ending(sequence)


def _is_ending(sequence: Sequence) -> bool:
    """Whether the step under way gives a running sequence its last token by `max_tokens`."""
    return (
        sequence.num_ahead > 0
        and sequence.num_output + sequence.num_ahead >= sequence.sampling.max_tokens
    )
