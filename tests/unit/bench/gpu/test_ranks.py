"""The parts of bench.gpu for ranks, on CPUs: what a card would be the first to run."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import parts, ranks
from bench.gpu.exchange import ExchangeLoad, check_exchange, devices_of_workers
from bench.gpu.ranks import RankLoad, check_ranks, layouts_on
from tests.forked_tests import with_forked_hands
from tests.paths import DEMO_MODEL


@with_forked_hands(2)
def test_ranks_that_share_a_device_give_the_tokens_of_one_rank() -> None:
    load = RankLoad(layouts=((2, 1), (1, 2)), prompts=(40, 5))
    rows = list(check_ranks(DEMO_MODEL, ["cpu", "cpu"], load))
    assert [(row.name, row.value) for row in rows] == [
        ("2 ranks in each of 1 stages: equal to one rank", 2),
        ("1 ranks in each of 2 stages: equal to one rank", 2),
    ]


@with_forked_hands(0)
def test_sums_are_captured_and_replayed() -> None:
    """Here the capture runs the passes, as a card does before and at each replay."""

    class Passes:
        def __call__(self, run):
            for _ in range(2):
                run()
            return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "CudaCapture", Passes)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        (row,) = ranks.check_captured_sums(torch.device("cpu"))
    assert (row.value, row.goal) == (0, "0")


def test_a_machine_with_few_cards_is_told_and_measures_what_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for part in ("cards", "exchange-cards"):
        (row,) = parts.PARTS[part](torch.device("cpu"))
        assert (row.part, row.value, row.goal) == (part, 1, "2")
        assert row.note == "this part needs 2 or more"
    assert layouts_on(2) == [(2, 1), (1, 2)]
    assert layouts_on(8) == [(2, 1), (1, 2), (4, 1), (2, 2)]
    assert [devices_of_workers(number) for number in (2, 3, 4, 8)] == [
        ("cuda:0", "cuda:0"),
        ("cuda:0", "cuda:0"),
        ("cuda:0", "cuda:2"),
        ("cuda:0", "cuda:2"),
    ]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_ranks_that_share_a_device_exchange_blocks_by_ends_of_their_own() -> None:
    load = ExchangeLoad(pairs=(((2, 1), (1, 2)),), prompts=(40, 5, 33))
    rows = check_exchange("exchange", DEMO_MODEL, ("cpu", "cpu"), load, is_shared=True)
    assert [(row.name, row.value) for row in rows] == [
        ("2 x 1 to 1 x 2: equal to one worker's", 3),
        ("2 x 1 to 1 x 2: sent and not arrived", 0),
    ]
