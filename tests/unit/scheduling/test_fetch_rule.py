"""Missing blocks are fetched or computed by bytes over a speed against tokens in the model."""

from __future__ import annotations

import pytest

from scheduling.fetch_rule import ComputeCost, PairCost, Run, weigh_fetch

CPU = ComputeCost(fixed_s=1e-3, per_token_s=2e-4, per_attended_s=0.0, chunk_tokens=512)
CARD = ComputeCost(fixed_s=0.0, per_token_s=5e-5, per_attended_s=0.0, chunk_tokens=2048)
SMALL, LARGE = 23_000 * 16, 131_000 * 16  # bytes of a block: SmolLM2-135M, a model of 8B


@pytest.mark.parametrize(
    ("compute", "block_bytes", "bytes_per_s", "pays"),
    [
        (CPU, SMALL, 4e9, True),
        (CPU, SMALL, 1e8, False),  # below the 0.12 GB/s at which both take as long
        (CARD, LARGE, 1e10, True),
        (CARD, LARGE, 1.25e9, False),  # 10 GbE
    ],
)
def test_a_thousand_tokens(
    compute: ComputeCost, block_bytes: int, bytes_per_s: float, pays: bool
) -> None:
    run = Run(num_blocks=63, first_block=0, block_size=16, block_bytes=block_bytes)
    assert weigh_fetch(run, 0, compute, PairCost(0.005, bytes_per_s)).pays is pays


def test_few_blocks_slow_holders_stale_hints_and_busy_links_are_not_worth_it() -> None:
    run = Run(num_blocks=10, first_block=0, block_size=16, block_bytes=SMALL)
    pair = PairCost(turn_s=0.005, bytes_per_s=4e9)
    assert weigh_fetch(run, 0, CPU, pair).pays
    assert not weigh_fetch(Run(1, 0, 16, SMALL), 0, CPU, pair).pays
    assert not weigh_fetch(run, 0, CPU, PairCost(0.5, 4e9)).pays
    assert not weigh_fetch(run, 0, CPU, PairCost(0.005, 4e9, found_share=0.2)).pays
    assert not weigh_fetch(run, 2000, CPU, pair).pays
    assert not weigh_fetch(run, 0, CPU, PairCost(0.03, 4e9)).pays
    assert weigh_fetch(run, 0, CPU, PairCost(0.03, 4e9), others_wait=True).pays


def test_attention_over_what_is_there_counts() -> None:
    attending = ComputeCost(0.0, 0.0, per_attended_s=1e-7, chunk_tokens=512)
    early, late = (Run(10, first, 16, SMALL) for first in (0, 1000))
    pair = PairCost(0.005, 4e9)
    assert not weigh_fetch(early, 0, attending, pair).pays
    assert weigh_fetch(late, 0, attending, pair).pays


def test_a_deadline_is_near_and_never_much_later_than_computing_would_be() -> None:
    run = Run(63, 0, 16, SMALL)
    quick = weigh_fetch(run, 0, CPU, PairCost(0.005, 4e9))
    assert quick.deadline_s == pytest.approx(3 * quick.fetch_s + 0.05)
    slow = weigh_fetch(run, 0, CPU, PairCost(5.0, 4e9))
    assert slow.deadline_s == pytest.approx(slow.compute_s + 0.5)
