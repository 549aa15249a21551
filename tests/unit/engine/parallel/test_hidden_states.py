"""Hidden states between stages: the same bytes for all ranks of the next stage, in order."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.checkpoint.shard import Shard
from engine.native.library import load_library
from engine.parallel.hidden_states import SLOT_BYTES, StageLink
from engine.parallel.shared_memory import RankMemory, RankSizes
from engine.parallel.sums import NoSums, RankLost

DEADLINE_S = 60.0
STEP_BYTES = SLOT_BYTES
"""The memory holds two steps: two slots."""


def ends(num_receivers: int, limit_s: float = DEADLINE_S) -> list[StageLink]:
    """The sender's, then the receivers'."""
    memory = memoryview(mmap.mmap(-1, StageLink.bytes_for(num_receivers, STEP_BYTES)))
    kernels = load_library()
    receivers = range(num_receivers)
    return [StageLink(kernels, memory, num_receivers, each, limit_s) for each in (0, *receivers)]


def numbers(seed: int, size: int) -> torch.Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


def test_all_receivers_get_all_states_in_order_whatever_their_sizes() -> None:
    sender, *receivers = ends(2)
    sizes = [1, SLOT_BYTES // 12, SLOT_BYTES // 12 + 1, 7, SLOT_BYTES, 3]

    def send() -> None:
        for seed, size in enumerate(sizes):
            sender.send(numbers(seed, size))

    def receive(link: StageLink) -> list[torch.Tensor]:
        found = [torch.empty(size, 3) for size in sizes]
        for each in found:
            link.receive(each)
        return found

    with ThreadPoolExecutor() as pool:
        sending = pool.submit(send)
        for received in list(pool.map(receive, receivers)):
            for seed, (size, states) in enumerate(zip(sizes, received, strict=True)):
                assert torch.equal(states, numbers(seed, size))
        sending.result(DEADLINE_S)


def test_a_stage_goes_on_until_two_steps_are_unread() -> None:
    sender, receiver = ends(1, limit_s=0.05)
    for seed in range(2):
        sender.send(numbers(seed, 4))
    with pytest.raises(RankLost, match=r"the next stage has not answered for 0\.05 s"):
        sender.send(numbers(2, 4))
    for seed in range(2):
        states = torch.empty(4, 3)
        receiver.receive(states)
        assert torch.equal(states, numbers(seed, 4))
    assert sender.waited_ns >= 50_000_000
    assert receiver.waited_ns == 0


def test_a_stage_that_sends_nothing_is_named() -> None:
    _, receiver = ends(1, limit_s=0.05)
    with pytest.raises(RankLost, match=r"the stage before has not answered for 0\.05 s"):
        receiver.receive(torch.empty(1, 3))


def test_all_waits_end_when_the_ranks_are_stopped() -> None:
    sizes = RankSizes(tp_size=2, num_stages=2, step_bytes=STEP_BYTES)
    memory = memoryview(mmap.mmap(-1, sizes.num_bytes))
    shared = RankMemory(load_library(), memory, sizes)
    last, first = (shared.ranks(Shard(0, 2, stage, 2), [], DEADLINE_S) for stage in (1, 0))
    assert last.before is not None
    told: list[str] = []

    def wait(number: int) -> None:
        try:
            if number:
                last.before.receive(torch.empty(1, 3))  # type: ignore[union-attr]
            else:
                first.sums.meet()
        except RankLost as error:
            told.append(str(error))

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    shared.stop()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert told == ["a rank of this worker has ended"] * 2


def test_ranks_of_a_stage_receive_and_one_of_the_stage_before_sends() -> None:
    sizes = RankSizes(tp_size=2, num_stages=3, step_bytes=STEP_BYTES)
    shared = RankMemory(load_library(), memoryview(mmap.mmap(-1, sizes.num_bytes)), sizes)
    shards = [Shard.numbered(number, 2, 3) for number in range(6)]
    assert [shard.number for shard in shards] == list(range(6))
    ranks = [shared.ranks(shard, [], DEADLINE_S) for shard in shards]
    assert [rank.shard.stage for rank in ranks] == [2, 2, 1, 1, 0, 0]
    assert [rank.before is not None for rank in ranks] == [True] * 4 + [False] * 2
    assert [rank.after is not None for rank in ranks] == [False, False, True, False, True, False]
    alone = RankSizes(tp_size=1, num_stages=2, step_bytes=STEP_BYTES)
    shared = RankMemory(load_library(), memoryview(mmap.mmap(-1, alone.num_bytes)), alone)
    assert isinstance(shared.ranks(Shard(0, 1, 1, 2), [], DEADLINE_S).sums, NoSums)
