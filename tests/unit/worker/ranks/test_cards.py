"""A worker's ranks as on cards: process groups, and a pool of its own for each; here gloo and CPUs.

Each test runs in a forked process, and its hand is forked as well.
"""

from __future__ import annotations

import signal
import socket
from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch

from bench.tools.listeners import listeners_of
from engine.checkpoint.shard import Shard
from engine.loader import load_engine
from engine.parallel.process_groups import RankGroups
from engine.parallel.shared_memory import RankSizes
from engine.parallel.sums import RankLost
from tests.forked_tests import with_forked_hands
from tests.unit.worker.ranks.test_hands import CONFIG, DEADLINE_S, Group, generate
from worker.ranks import hand
from worker.ranks.link import Orders, Place

CPUS = ("cpu", "cpu")


@pytest.mark.parametrize("num_stages", [1, 2])
@with_forked_hands(1)
def test_ranks_with_pools_of_their_own_compute_what_one_rank_computes(num_stages: int) -> None:
    expected = generate(load_engine(CONFIG, lambda: 0.0))
    with Group(num_stages, devices=CPUS) as group:
        loaded = group.load()
        assert generate(loaded) == expected
        assert not loaded.pool.others, "no rank reaches another one's card"
        addresses = {each.address for each in listeners_of(group.hand.pid)}
        assert addresses <= {"127.0.0.1"}, "gloo listens on the loopback interface only"
        group.hands.close()
        assert group.told == []


@pytest.mark.parametrize("num_stages", [1, 2])
@with_forked_hands(1)
def test_a_hand_that_is_killed_is_told_and_ends_the_step(num_stages: int) -> None:
    with Group(num_stages, devices=CPUS) as group:
        loaded = group.load()
        generate(loaded, 1)
        group.hand.kill()
        assert group.was_told.wait(DEADLINE_S)
        assert group.told == ["rank 1 of 2 has ended by signal 9"]
        with pytest.raises(RankLost):
            generate(loaded, 1)


@with_forked_hands(1)
def test_a_hand_that_ends_while_it_loads_fails_the_start() -> None:
    with Group(devices=CPUS) as group:
        group.hand.kill()
        with pytest.raises(RankLost, match=r"rank (1 )?is gone"):
            group.load()
        assert group.told == []


@with_forked_hands(1)
def test_a_hand_that_ends_while_the_head_waits_on_its_card_is_told() -> None:
    """No call of the head fails then."""
    with Group(devices=CPUS) as group:

        def wait(groups: RankGroups) -> None:
            group.hand.kill()
            assert group.was_told.wait(DEADLINE_S)
            raise RankLost("in a worker, the process has ended")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RankGroups, "open", wait)
            with pytest.raises(RankLost, match="the process has ended"):
                group.load()
        assert group.told == ["rank 1 of 2 has ended by signal 9"]


@with_forked_hands(1)
def test_a_step_that_hangs_on_a_card_is_told() -> None:
    with Group(devices=CPUS, silence_s=1.0) as group:
        loaded = group.load()
        watch = group.hands.ranks.watch
        assert watch is not None
        watch.note(NeverPassed())
        assert group.was_told.wait(DEADLINE_S)
        assert group.told == ["a step of all ranks has not ended within 1 s"]
        assert loaded.pool.num_blocks == CONFIG.num_blocks


@with_forked_hands(0)
def test_a_rank_whose_card_is_full_says_so_by_one_line() -> None:
    orders = Orders(
        Shard(1, 2),
        RankSizes(2, 1, 0),
        CONFIG,
        1,
        Place(0, 0),
        1.0,
        "info",
        "text",
        "w",
        devices=CPUS,
    )
    ours, theirs = socket.socketpair()

    def work(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as said:
        patch.setattr(hand, "bind_to", lambda head, end_signal: True)
        patch.setattr(hand, "receive", lambda link: (orders, (-1, theirs.detach())))
        patch.setattr(hand, "_work_on_card", work)
        assert hand.main([str(ours.detach()), "1"]) == 1
    (line,) = said.getvalue().splitlines()
    assert line.startswith(
        "rank 1: CUDA out of memory. Tried to allocate 2.00 GiB.: use more ranks"
    )


class NeverPassed:
    def is_done(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("the watch never waits for a device")


@with_forked_hands(1)
def test_a_hand_that_stands_still_is_killed_once_its_worker_ends() -> None:
    with Group(devices=CPUS) as group:
        loaded = group.load()
        generate(loaded, 1)
        group.hand.send_signal(signal.SIGSTOP)
