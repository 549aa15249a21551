"""KV handed over between pools of different tensor-parallel size: ranks of a gloo group, in
processes of their own, by the real transports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.shard_ranks import (
    DEADLINE_S,
    FIRST_BLOCK,
    PROMPT_BLOCKS,
    Case,
    rank_main,
)
from tests.rank_group import RankGroup

GRANTED = list(range(FIRST_BLOCK, PROMPT_BLOCKS))


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    group = RankGroup(rank_main, tmp_path_factory.mktemp("gloo") / "store", 6)
    yield group
    group.end(DEADLINE_S)


def play(group: RankGroup, case: Case) -> list[dict[str, Any]]:
    """What each target rank saw, in order."""
    dying = () if case.dies_after is None else (1,)
    return [answer for answer in group.do(case, 2 * DEADLINE_S, dying) if answer]


@pytest.mark.parametrize(
    "case",
    [
        Case("nixl", 1, 1),
        Case("nixl", 1, 2),
        Case("nixl", 2, 1),
        Case("nixl", 2, 4),
        Case("nixl", 4, 2),
        Case("shm", 2, 4),
        Case("shm", 4, 2),
        Case("nixl", 2, 1, checksum=True),
        Case("nixl", 1, 2, checksum=True),
    ],
    ids=str,
)
def test_every_target_rank_gets_its_slice_of_the_whole(group: RankGroup, case: Case) -> None:
    answers = play(group, case)
    assert len(answers) == case.target_size
    for answer in answers:
        assert answer == {
            "complete": 1,
            "failed": [],
            "unfenced": 1,
            "right": (GRANTED, True),
        }


def test_one_source_rank_s_wrong_digest_fails_the_whole(group: RankGroup) -> None:
    (answer,) = play(group, Case("nixl", 2, 1, checksum=True, corrupt=True))
    assert answer["complete"] == 0
    assert answer["failed"] == [("rank 1: the digest of a block differs", ())]
    assert answer["unfenced"] == 1
    right, others_untouched = answer["right"]
    assert 5 not in right, "the block was to be corrupt"
    assert others_untouched


def test_a_source_rank_that_dies_in_the_middle(tmp_path: Path) -> None:
    """What it had written counts where the other rank's part is there, too, and nothing else."""
    group = RankGroup(rank_main, tmp_path / "store", 3)
    (answer,) = play(group, Case("nixl", 2, 1, dies_after=3))
    group.end(DEADLINE_S)
    arrived = tuple(GRANTED[:3])
    assert answer["complete"] == 0
    assert answer["failed"] == [("rank 1: the source is gone", arrived)]
    assert answer["unfenced"] == 1
    assert answer["right"] == (list(arrived), True)
