"""Slow work waits for itself alone; a lane's work is done in order, by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from engine.sampling.mask_pool import Lane, MaskPool

QUICK_S, SLOW_S, LONG_S = 0.0, 0.2, 90.0


@dataclass(eq=False)
class Piece:
    """Work that a thread begins (`begun`) and ends when its `gate` is open."""

    lane: Lane
    cost_s: float = QUICK_S
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class Pools:
    """Pools whose work the test opens the gates of."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.order: list[Piece] = []
        self.opened: list[MaskPool[Piece]] = []
        self.taken: set[Lane] = set()

    def open(self, budget_s: float) -> MaskPool[Piece]:
        def compute(pieces: list[Piece]) -> None:
            lanes = {piece.lane for piece in pieces}
            assert not lanes & self.taken, "two threads have one lane"
            self.taken |= lanes
            for piece in pieces:
                piece.begun.set()
                assert piece.gate.wait(LONG_S)
                piece.lane.cost_s = piece.cost_s
                self.order.append(piece)
                piece.done.set()
                pool.note(piece)
            self.taken -= lanes

        pool = MaskPool[Piece](compute, budget_s)
        self.opened.append(pool)
        return pool

    def piece(self, lane: Lane, cost_s: float = QUICK_S, is_open: bool = True) -> Piece:
        piece = Piece(lane, cost_s)
        if is_open:
            piece.gate.set()
        self.pieces.append(piece)
        return piece


@pytest.fixture
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    for piece in pools.pieces:
        piece.gate.set()
    for pool in pools.opened:
        pool.close()
        assert not any(thread.is_alive() for thread in pool._threads)


def is_done(piece: Piece) -> bool:
    return piece.done.is_set()


def test_work_that_is_done_in_time_is_waited_for(pools: Pools) -> None:
    pool = pools.open(LONG_S)
    pieces = [pools.piece(Lane()) for _ in range(5)]
    pool.submit(pieces)
    pool.wait_for(pieces, is_done)
    assert all(map(is_done, pieces))


def test_who_is_late_is_slow_and_not_waited_for_again_until_it_is_quick(pools: Pools) -> None:
    pool = pools.open(0.01)
    lane = Lane()
    first, second = pools.piece(lane, is_open=False), pools.piece(lane, is_open=False)
    pool.submit([first])
    assert not pool.is_slow(lane)
    pool.wait_for([first], is_done)
    assert pool.is_slow(lane)
    assert not is_done(first)
    pool.submit([second])
    pool.wait_for([second], is_done)
    assert not is_done(second)
    for piece in (first, second):
        piece.gate.set()
        assert piece.done.wait(LONG_S)
    assert not pool.is_slow(lane)


def test_a_slow_lane_holds_up_no_quick_one(pools: Pools) -> None:
    pool = pools.open(0.1)
    slow = [pools.piece(Lane(SLOW_S), SLOW_S, is_open=False) for _ in range(4)]
    pool.submit(slow)
    assert slow[0].begun.wait(LONG_S)
    quick = Lane()
    for _ in range(20):
        piece = pools.piece(quick)
        pool.submit([piece])
        assert piece.done.wait(LONG_S)
    assert not any(piece.begun.is_set() for piece in slow[1:]), "they share one thread"


def test_a_lane_that_was_quick_and_hangs_leaves_a_thread_to_the_others(pools: Pools) -> None:
    pool = pools.open(0.1)
    hanging, other = pools.piece(Lane(), is_open=False), pools.piece(Lane())
    pool.submit([hanging])
    assert hanging.begun.wait(LONG_S)
    pool.submit([other])
    assert other.done.wait(LONG_S)


def test_much_quick_work_is_slow(pools: Pools) -> None:
    pool = pools.open(0.1)
    lane = Lane(0.04)
    pieces = [pools.piece(lane, 0.04, is_open=False) for _ in range(9)]
    pool.submit(pieces)
    assert pool.is_slow(lane)
    assert pieces[0].begun.wait(LONG_S)
    pool.wait_for(pieces, is_done)  # of a slow lane: returns at once
    assert not any(map(is_done, pieces))
    for piece in pieces:
        piece.gate.set()
        assert piece.done.wait(LONG_S)
    assert pools.order == pieces


def test_work_of_a_lane_is_done_in_order(pools: Pools) -> None:
    pool = pools.open(LONG_S)
    lanes = [Lane() for _ in range(3)]
    pieces = [pools.piece(lanes[number % 3]) for number in range(60)]
    for start in range(0, 60, 4):
        pool.submit(pieces[start : start + 4])
    pool.wait_for(pieces, is_done)
    for lane in lanes:
        mine = [piece for piece in pieces if piece.lane is lane]
        assert [piece for piece in pools.order if piece.lane is lane] == mine


def test_one_thread_at_a_time_has_a_lane(pools: Pools) -> None:
    pool = pools.open(0.01)
    lane = Lane()
    first, second = pools.piece(lane, is_open=False), pools.piece(lane)
    pool.submit([first])
    assert first.begun.wait(LONG_S)
    lane.cost_s = SLOW_S  # another thread's queue
    behind = pools.piece(Lane(SLOW_S))
    pool.submit([second])
    pool.submit([behind])
    assert behind.done.wait(LONG_S)
    assert not second.begun.is_set()
    first.gate.set()
    assert second.done.wait(LONG_S)


def test_nobody_waits_for_a_slow_lane(pools: Pools) -> None:
    pool = pools.open(LONG_S)
    piece = pools.piece(Lane(2 * LONG_S), is_open=False)
    pool.submit([piece])
    waiting = threading.Thread(target=pool.wait_for, args=([piece], is_done))
    waiting.start()
    waiting.join(LONG_S / 3)
    assert not waiting.is_alive()
