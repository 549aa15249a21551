"""A router's index and a worker's cache, whose list comes in pieces: what the router asks and what
the worker answers may be lost or late, and the cache changes meanwhile."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from process.sockets.control import Peer
from protocol.events import CacheEvents
from protocol.messages import CacheDump, CacheDumpRequest, Role
from router.routing.caches.cache_index import CacheIndex
from scheduling.block_manager import BlockManager
from tests.effort import NIGHTLY, times
from worker.cache_dumps import CacheDumps

ROUTER = Peer(b"router", "router", Role.ROUTER)
PIECE, MOST_ROUNDS = 2, 100
MANY = st.lists(st.integers(0, 11), max_size=8)


class DumpInPieces(RuleBasedStateMachine):
    """Once nothing is lost any more, the index equals the cache."""

    @initialize()
    def begin(self) -> None:
        self.blocks = BlockManager(8)
        self.seq = 0
        self.dumps = CacheDumps(self.whole)
        self.index = CacheIndex(5.0)
        self.index.join("w", "i")
        self.asked: deque[CacheDumpRequest] = deque([self.index.new_dump("w")])
        self.pieces: deque[CacheDump] = deque()
        self.now = 0.0

    def publish(self) -> CacheEvents | None:
        """The cache's changes, if there are any."""
        delta = self.blocks.drain_events()
        if not delta.stored and not delta.removed:
            return None
        self.seq += 1
        return CacheEvents(
            worker_id="w", incarnation="i", seq=self.seq, stored=delta.stored, removed=delta.removed
        )

    def deliver(self, events: CacheEvents | None) -> None:
        if events is not None and self.index.apply_events(events):
            self.asked.append(self.index.new_dump("w"))

    def whole(self) -> CacheDump:
        self.deliver(self.publish())
        return CacheDump(incarnation="i", seq=self.seq, hashes=self.blocks.hashes())

    @rule(numbers=MANY, arrives=st.booleans())
    def change(self, numbers: list[int], arrives: bool) -> None:
        for number in numbers:
            (block,) = self.blocks.allocate(1)
            self.blocks.publish(block, bytes([number]) * 16)
            self.blocks.release([block])
        events = self.publish()
        if arrives:
            self.deliver(events)

    @precondition(lambda self: self.asked)
    @rule(is_lost=st.booleans())
    def answer(self, is_lost: bool) -> None:
        asked = self.asked.popleft()
        piece = self.dumps.piece(ROUTER, asked, [ROUTER])
        assert len(piece.hashes) <= PIECE
        if not is_lost:
            self.pieces.append(piece)

    @precondition(lambda self: self.pieces)
    @rule()
    def take(self) -> None:
        wanted = self.index.take_piece("w", self.pieces.popleft())
        if wanted is not None:
            self.asked.append(wanted)

    @rule()
    def report(self) -> None:
        """The load report names the newest event."""
        if self.index.check_seq("w", "i", self.seq):
            self.asked.append(self.index.new_dump("w"))

    @rule()
    def wait(self) -> None:
        self.now += 100.0
        for worker_id in self.index.overdue(self.now):
            self.asked.append(self.index.next_piece(worker_id))

    def teardown(self) -> None:
        for _ in range(MOST_ROUNDS):
            self.wait()
            self.report()
            if self.index.is_synced("w") and not self.asked and not self.pieces:
                break
            for _ in range(len(self.asked)):
                self.answer(is_lost=False)
            for _ in range(len(self.pieces)):
                self.take()
        assert self.index.is_synced("w")
        assert self.index._workers["w"].hashes == set(self.blocks.hashes())
        assert not self.asked, "nobody asks for ever"
        assert not self.dumps._lists, "nothing is kept of a list that was read"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.cache_dumps.PIECE_BLOCKS", PIECE)


TestDumpInPieces = DumpInPieces.TestCase
TestDumpInPieces.settings = settings(
    max_examples=times(25, 600), derandomize=not NIGHTLY, stateful_step_count=40, deadline=None
)
