"""The unfinished sequences of a worker, by state, and how many blocks and tokens they are. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from scheduling.queues.waiting_work import WaitingWork
from scheduling.sequence import Key, Sequence, SequenceState
from scheduling.sequence_blocks import SequenceBlocks


class Roster:
    """Owner of the sequences' states: only `move` and `wait` change them."""

    def __init__(self, block_size: int, blocks: SequenceBlocks) -> None:
        self.waiting: dict[Key, Sequence] = {}
        self.receiving: dict[Key, Sequence] = {}
        self.fetching: dict[Key, Sequence] = {}
        self.prefilling: dict[Key, Sequence] = {}
        self.running: dict[Key, Sequence] = {}
        self._by_state = {
            SequenceState.RUNNING: self.running,
            SequenceState.PREFILLING: self.prefilling,
            SequenceState.FETCHING: self.fetching,
            SequenceState.RECEIVING: self.receiving,
            SequenceState.WAITING: self.waiting,
        }
        self._block_size = block_size
        self._blocks = blocks
        self._work = WaitingWork(block_size)
        self._next_deadline = inf  # no sequence has an earlier one

    def __iter__(self) -> Iterator[Sequence]:
        """All unfinished sequences."""
        for each in self._by_state.values():
            yield from each.values()

    def find(self, key: Key) -> Sequence | None:
        """The sequence with this key; None if it is unknown or finished."""
        return next((each[key] for each in self._by_state.values() if key in each), None)

    def expired(self, now: float) -> list[Sequence]:
        """The sequences past their deadline."""
        if now < self._next_deadline:
            return []
        self._next_deadline = min([each.deadline for each in self], default=inf)
        return [each for each in self if each.deadline <= now]

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence that is in the state WAITING."""
        self.waiting[sequence.key] = sequence
        self._next_deadline = min(self._next_deadline, sequence.deadline)
        num_cached = self._blocks.usable_prefix(sequence).num_blocks
        self._work.add(sequence, num_cached, self._blocks.num_needed(sequence, sequence.num_tokens))

    def move(self, sequence: Sequence, state: SequenceState) -> None:
        """Change the state of a sequence. One that is to wait is not queued yet: see `wait`."""
        if sequence.state is SequenceState.WAITING:
            self._work.remove(sequence)
        key, former = sequence.key, self._by_state.get(sequence.state)
        if former is not None:
            former.pop(key, None)
        sequence.transition(state)
        if state is not SequenceState.WAITING and state is not SequenceState.FINISHED:
            self._by_state[state][key] = sequence

    @property
    def num_begun(self) -> int:
        """Sequences with blocks: receiving, fetching, prefilling, decoding."""
        begun = len(self.receiving) + len(self.fetching) + len(self.prefilling)
        return begun + len(self.running)

    @property
    def num_held_up(self) -> int:
        """Number of waiting sequences that need only room or time here."""
        return sum(
            each.source_has_begun if each.remote else each.is_ready
            for each in self.waiting.values()
        )

    @property
    def blocks_granted(self) -> int:
        """Blocks of sequences whose KV a peer is writing."""
        granted = 0
        for each in self.receiving.values():
            granted += self._blocks.num_held(each)
        for each in self.fetching.values():
            granted += each.num_expected
        return granted

    @property
    def blocks_waiting(self) -> int:
        """Blocks that the waiting sequences will need, cached ones included."""
        return self._work.num_blocks

    @property
    def queued_tokens(self) -> int:
        """Tokens that this worker still has to prefill."""
        queued = self._work.num_tokens
        for each in self.prefilling.values():
            queued += each.num_remaining
        for each in self.fetching.values():
            queued += each.num_remaining - each.num_expected * self._block_size
        return queued
