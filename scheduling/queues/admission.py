"""Which waiting sequences begin in a step, and what they begin with. Pure."""

from __future__ import annotations

from collections.abc import Callable

from scheduling.block_pools import Prefix
from scheduling.decode_worker_shares import TargetShares
from scheduling.queues.arriving_blocks import ExpectedBlocks
from scheduling.queues.overtaking import Overtaking
from scheduling.queues.roster import Roster
from scheduling.queues.shared_prompts import SharedPrompts
from scheduling.scheduler_config import SchedulerConfig
from scheduling.sequence import Sequence, SequenceState
from scheduling.sequence_blocks import SequenceBlocks
from scheduling.step_plan import StepPlan
from scheduling.turns import Turns

FetchChooser = Callable[[Sequence, int], int | None]
"""Returns how many blocks of a sequence with `holders` to fetch after this many cached ones: 0 for
none, None if that cannot be decided yet. Called when the sequence could be admitted."""


def fetch_nothing(_sequence: Sequence, _num_cached: int) -> int:
    """See FetchChooser."""
    return 0


class Admission:
    """Admits sequences of `roster` in turn, each with all its blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        roster: Roster,
        blocks: SequenceBlocks,
        turns: Turns,
        shares: TargetShares,
        expected: ExpectedBlocks,
    ) -> None:
        self._config = config
        self._roster = roster
        self._blocks = blocks
        self._turns = turns
        self._shares = shares
        self._expected = expected

    def admit(self, step: StepPlan, choose_fetch: FetchChooser) -> None:
        """Admit sequences in turn, each with all its blocks. One that does not fit lets only small
        ones pass, see `Overtaking`.

        A local sequence without any budget left holds up later local sequences, but not remote
        ones, which need no budget. A sequence holds up no others while its grammar is being
        compiled, while its source has not begun, while another sequence is fetching or computing
        blocks that it needs, or while a peer that it may fetch from has not answered. A sequence
        whose target already has its share of the pool holds up only younger ones for that target.
        """
        if self._is_full:
            return
        budget_left = True
        full_targets: set[str] = set()
        overtaking = Overtaking(self._blocks.pages_for)
        prefilling = self._roster.prefilling.values()
        shared = SharedPrompts(step, prefilling, not self._blocks.pools.is_plain)
        for sequence in self._turns.in_turn(self._roster.waiting.values()):
            if self._is_full or overtaking.is_over:
                break
            if not _may_begin(sequence, budget_left) or shared.hold_up(sequence):
                continue
            if sequence.target in full_targets or not overtaking.may_pass(sequence):
                continue
            cached = self._blocks.usable_prefix(sequence)
            if self._expected.have_next_of(sequence, cached.num_blocks):
                continue
            if self._shares.exceeds(sequence, cached):
                full_targets.add(sequence.target)
                continue
            num_fetched = self._num_to_fetch(sequence, cached.num_blocks, choose_fetch)
            if num_fetched is None:
                continue
            if not sequence.remote and not num_fetched:
                start = cached.num_blocks * sequence.block_size
                if not budget_left or not step.chunk_tokens(sequence, start):
                    budget_left = False
                    continue
            if not self._try_take_blocks(sequence, cached):
                overtaking.block(sequence)
                continue
            overtaking.passed(sequence)
            self._begin(step, sequence, num_fetched)

    def pause(self) -> None:
        """Note that no sequence waits."""
        if not self._is_full:
            self._turns.pause()

    @property
    def _is_full(self) -> bool:
        return self._roster.num_begun >= self._config.max_batch_size

    def _num_to_fetch(
        self, sequence: Sequence, num_cached: int, choose_fetch: FetchChooser
    ) -> int | None:
        """See `FetchChooser`."""
        if sequence.holders is None or sequence.remote:
            return 0
        return choose_fetch(sequence, num_cached)

    def _try_take_blocks(self, sequence: Sequence, cached: Prefix) -> bool:
        """Pin the prefix and allocate the rest; keeps headroom for the sequences that decode."""
        headroom = self._config.headroom_per_sequence * len(self._roster.running)
        return self._blocks.try_take(sequence, cached, headroom)

    def _begin(self, step: StepPlan, sequence: Sequence, num_fetched: int) -> None:
        """Let a sequence that has its blocks receive, fetch or compute. One that fetches is charged
        for the tokens that it computes when its fetch is over (`Scheduler.fetch_over`)."""
        charge = max(sequence.num_remaining, sequence.block_size)
        if sequence.remote:
            self._roster.move(sequence, SequenceState.RECEIVING)
            step.batch.received.append(sequence)
        elif num_fetched:
            self._roster.move(sequence, SequenceState.FETCHING)
            self._expected.expect(sequence, num_fetched)
            step.batch.fetching.append(sequence)
            charge = 0
        else:
            self._roster.move(sequence, SequenceState.PREFILLING)
            size = step.chunk_tokens(sequence, sequence.num_launched)
            if size:  # 0: admitted without its prefix, it has too many tokens for this step
                step.add(sequence, size)
        self._shares.admit(sequence)
        self._turns.admit(sequence, charge)


def _may_begin(sequence: Sequence, budget_left: bool) -> bool:
    """Whether a waiting sequence needs only blocks. Without budget it may receive or fetch."""
    if sequence.remote:
        return sequence.source_has_begun
    return sequence.is_ready and (budget_left or sequence.is_hinted)
