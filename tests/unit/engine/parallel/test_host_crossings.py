"""Sums and hidden states of ranks on several hosts: threads stand for ranks. They share memory only
with the others of their host, and send everything else by gloo."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from engine.checkpoint.shard import Shard
from engine.native.library import load_library
from engine.parallel.host_mesh import HostMesh
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import RankMemory, RankSizes
from engine.parallel.sums import RankLost
from protocol.errors import ConfigError

DEADLINE_S = 20.0
ADDRESS = "127.0.0.1"


class Swap:
    """What the links of ranks do for one exchange."""

    def __init__(self, num_ranks: int) -> None:
        self._given: dict[int, bytes] = {}
        self._barrier = threading.Barrier(num_ranks, timeout=DEADLINE_S)

    def of(self, rank: int) -> Callable[[bytes], Sequence[bytes]]:
        def exchange(own: bytes) -> Sequence[bytes]:
            self._given[rank] = own
            self._barrier.wait()
            return list(self._given.values())

        return exchange


def on_all(sizes: RankSizes, run: Callable[[Ranks], Any], limit_s: float = DEADLINE_S) -> list[Any]:
    """What each rank's `run` returns, by number."""
    kernels = load_library()
    num_ranks = sizes.tp_size * sizes.num_stages
    memories = [memoryview(mmap.mmap(-1, sizes.num_bytes)) for _ in range(sizes.num_hosts)]
    swap = Swap(num_ranks)
    meshes = []  # alive until all ranks have what was sent

    def live(number: int) -> Any:
        mesh = HostMesh(ADDRESS, number, num_ranks, swap.of(number), limit_s)
        meshes.append(mesh)
        memory = RankMemory(kernels, memories[number // sizes.num_local], sizes)
        shard = Shard.numbered(number, sizes.tp_size, sizes.num_stages)
        return run(memory.ranks(shard, [], limit_s, mesh))

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(live, range(num_ranks)))


def part_of(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(("tp_size", "num_hosts"), [(2, 2), (4, 2), (3, 3)])
def test_all_ranks_get_equal_sums_and_what_the_first_one_shares(
    tp_size: int, num_hosts: int
) -> None:
    bounds = list(range(0, 3 * tp_size + 1, 3))

    def run(ranks: Ranks) -> Any:
        rank, sums = ranks.shard.rank, ranks.sums
        assert (sums.rank, sums.address) == (rank, None)
        added = [part_of(rank, 5, 7), part_of(rank, 5, 7).bfloat16(), part_of(rank, 0, 7)]
        for part in added:
            sums.add_up(part)
        shared = part_of(rank, 2, 3)
        sums.share(shared)
        whole = torch.zeros(2, bounds[-1]) if rank == 0 else None
        sums.gather(part_of(rank, 2, 3), bounds, whole)
        sums.meet()
        sums.check()
        return added, shared, whole

    found = on_all(RankSizes(tp_size, 1, 1 << 12, num_hosts), run)
    size = tp_size // num_hosts
    parts = [part_of(rank, 5, 7) for rank in range(tp_size)]
    narrow = [part.bfloat16().float() for part in parts]
    by_host = [sum(narrow[at : at + size]).bfloat16().float() for at in range(0, tp_size, size)]
    for added, shared, _ in found:
        assert torch.allclose(added[0], torch.stack(parts).sum(0), atol=1e-6)
        assert torch.equal(added[1], sum(by_host).bfloat16()), "hosts add up in fp32"
        assert [torch.equal(*pair) for pair in zip(added, found[0][0], strict=True)] == [True] * 3
        assert torch.equal(shared, part_of(0, 2, 3))
    assert torch.equal(found[0][2], torch.cat([part_of(r, 2, 3) for r in range(tp_size)], dim=1))


@pytest.mark.parametrize(("tp_size", "num_hosts"), [(1, 2), (2, 2), (2, 4)])
def test_all_ranks_of_the_next_stage_get_the_hidden_states(tp_size: int, num_hosts: int) -> None:
    steps = range(4)

    def run(ranks: Ranks) -> list[torch.Tensor]:
        got = []
        for step in steps:
            if ranks.after is not None:
                assert ranks.shard.stage == 0
                states = part_of(step, 3, 8)
                ranks.after.send(states)
                states.zero_()  # the sender may use its memory again
            if ranks.before is not None:
                got.append(torch.zeros(3, 8))
                ranks.before.receive(got[-1])
        ranks.sums.meet()
        return got

    found = on_all(RankSizes(tp_size, 2, 1 << 12, num_hosts), run)
    for number, got in enumerate(found):
        expected = [part_of(step, 3, 8) for step in steps] if number < tp_size else []
        assert [torch.equal(*pair) for pair in zip(got, expected, strict=True)] == [True] * len(got)


def test_a_rank_that_does_not_answer_is_named() -> None:
    is_told = threading.Event()

    def run(ranks: Ranks) -> str:
        if ranks.shard.rank == 1:
            assert is_told.wait(DEADLINE_S)
            return ""
        with pytest.raises(RankLost) as told:
            ranks.sums.add_up(torch.ones(3))
        is_told.set()
        return str(told.value)

    first, _ = on_all(RankSizes(2, 1, 1 << 12, 2), run, limit_s=0.5)
    assert first == "rank 1 has not answered for 0.5 s"


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gloo cannot listen on 192\.0\.2\.77"):
        HostMesh("192.0.2.77", 0, 2, lambda own: [own], 1.0)


def test_ranks_that_are_lost_while_they_connect_say_why() -> None:
    def exchange(own: bytes) -> Sequence[bytes]:
        raise RankLost("rank 1 is gone")

    with pytest.raises(RankLost, match="rank 1 is gone"):
        HostMesh(ADDRESS, 0, 2, exchange, 1.0)
