"""Sums of ranks through shared memory: real processes, equal bits on all of them."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.native.library import load_library
from engine.parallel.sums import _BUFFER_BYTES, HostSums, RankLost, stop_sums
from tests.rank_group import RankGroup, meet

DEADLINE_S = 60.0
NUM_RANKS = 3
LARGE = _BUFFER_BYTES // 4 + 17


def part_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = np.random.default_rng(rank).standard_normal(size, dtype=np.float32)
    return torch.from_numpy(numbers).to(dtype)


def rank_main(conn: Connection, store: str, rank: int, size: int) -> None:
    """Add up parts of the asked sizes and types, one after the other."""
    ranks = meet(store, rank, size, DEADLINE_S)
    while (job := conn.recv()) is not None:
        answers = []
        for count, dtype in job:
            part = part_of(rank, count, getattr(torch, dtype))
            ranks.sums.add_up(part)
            answers.append(part.float().numpy())
        conn.send(answers)


def test_every_rank_gets_the_sum_in_the_order_of_ranks(tmp_path: Path) -> None:
    group = RankGroup(rank_main, tmp_path / "store", NUM_RANKS)
    sizes = [1, 576, LARGE, 3, LARGE, 64] * 3
    job: Any = [(size, dtype) for size in sizes for dtype in ("float32", "bfloat16")]
    answers = group.do(job, DEADLINE_S)
    group.end(DEADLINE_S)
    for number, (size, dtype) in enumerate(job):
        parts = [part_of(rank, size, getattr(torch, dtype)).float() for rank in range(NUM_RANKS)]
        expected = (parts[0] + parts[1] + parts[2]).to(getattr(torch, dtype)).float().numpy()
        for answer in answers:
            assert np.array_equal(answer[number], expected), (number, size, dtype)


def exchanging_main(conn: Connection, store: str, rank: int, size: int) -> None:
    """Gather parts of rows of the asked widths, then share what the first rank has of them."""
    ranks = meet(store, rank, size, DEADLINE_S)
    while (job := conn.recv()) is not None:
        num_rows, bounds = job
        numbers = whole_rows(num_rows, bounds)
        part = numbers[:, bounds[rank] : bounds[rank + 1]].contiguous()
        found = torch.zeros_like(numbers)
        ranks.sums.gather(part, bounds, None if rank else found)
        ranks.sums.share(found)
        conn.send(found.numpy())


def whole_rows(num_rows: int, bounds: list[int]) -> torch.Tensor:
    return part_of(7, num_rows * bounds[-1], torch.float32).view(num_rows, bounds[-1])


@pytest.mark.parametrize(
    ("num_rows", "bounds"),
    [
        (1, [0, 1, 2, 4]),
        (5, [0, 100, 201, 302]),
        (0, [0, 1, 2, 3]),
        (40, [0, 20_000, 40_000, 60_001]),
        (2, [0, LARGE, LARGE, 2 * LARGE + 1]),
    ],
    ids=["a row", "rows", "none", "many rounds", "rows of many rounds"],
)
def test_the_ranks_parts_of_rows_come_together(
    exchange: RankGroup, num_rows: int, bounds: list[int]
) -> None:
    expected = whole_rows(num_rows, bounds).numpy()
    for found in exchange.do((num_rows, bounds), DEADLINE_S):
        assert np.array_equal(found, expected)


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    group = RankGroup(exchanging_main, tmp_path_factory.mktemp("exchange") / "store", NUM_RANKS)
    yield group
    group.end(DEADLINE_S)


def memory(num_ranks: int) -> memoryview:
    return memoryview(mmap.mmap(-1, HostSums.bytes_for(num_ranks)))


def test_a_rank_that_does_not_answer_is_named() -> None:
    sums = HostSums(load_library(), memory(2), 0, 2, limit_s=0.05)
    with pytest.raises(RankLost, match=r"rank 1 has not answered for 0\.05 s"):
        sums.add_up(torch.ones(4))


def test_a_wait_ends_when_sums_are_stopped() -> None:
    shared, kernels = memory(2), load_library()
    sums = HostSums(kernels, shared, 1, 2, limit_s=DEADLINE_S)
    told: list[str] = []

    def add_up() -> None:
        try:
            sums.add_up(torch.ones(4))
        except RankLost as error:
            told.append(str(error))

    thread = threading.Thread(target=add_up)
    thread.start()
    stop_sums(kernels, shared)
    thread.join(DEADLINE_S)
    assert told == ["a rank of this worker has ended"]
    with pytest.raises(RankLost, match="has ended"):
        sums.add_up(torch.ones(4))


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="too few for 3 ranks"):
        HostSums(load_library(), memory(2), 0, 3, limit_s=1.0)
