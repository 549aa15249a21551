"""Ranks on cards: two that share one, NCCL's sums in a graph, and ranks with a card each; and their
exchange of KV blocks with other workers.

`bench.gpu` has the same checks in its parts `ranks`, `exchange`, `cards` and `exchange-cards`.
"""

from __future__ import annotations

import pytest
import torch

from bench.gpu.exchange import ExchangeLoad, check_exchange, devices_of_workers
from bench.gpu.ranks import RankLoad, check_captured_sums, check_ranks, layouts_on
from tests.gpu.on_card import CARD, ON_CARD
from tests.paths import DEMO_MODEL

pytestmark = ON_CARD

NUM_CARDS = torch.cuda.device_count()
SEVERAL = pytest.mark.skipif(NUM_CARDS < 2, reason=f"needs two CUDA cards, and sees {NUM_CARDS}")


def assert_equal_to_one_rank(devices: list[str], layouts: list[tuple[int, int]], *ways: str):
    load = RankLoad(layouts)
    rows = list(check_ranks(DEMO_MODEL, devices, load, ways))
    exact = [row for row in rows if row.unit == "prompts"]
    assert [row.value for row in exact] == [len(load.prompts)] * len(layouts)
    assert len(rows) == len(layouts) * (1 + len(ways) * (len(set(devices)) > 1))


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
def test_two_ranks_on_one_card_give_the_tokens_of_one(layout):
    assert_equal_to_one_rank([str(CARD)] * 2, [layout])


def test_nccls_sums_are_captured_in_a_graph():
    (row,) = check_captured_sums(CARD)
    assert row.value == 0, row.note


@SEVERAL
@pytest.mark.parametrize("way", ["nccl", "symmetric", "auto"])
@pytest.mark.parametrize("layout", layouts_on(max(2, NUM_CARDS)))
def test_ranks_with_a_card_each_give_the_tokens_of_one(layout, way):
    devices = [f"cuda:{index}" for index in range(NUM_CARDS)]
    assert_equal_to_one_rank(devices, [layout], way)


def assert_exchanged(devices, load, is_shared):
    rows = list(check_exchange("exchange", DEMO_MODEL, devices, load, is_shared))
    expected = [len(load.prompts), 0] * len(load.pairs)
    assert [row.value for row in rows] == expected, [row.note for row in rows]


@pytest.mark.parametrize("pair", ExchangeLoad().pairs)
def test_ranks_that_share_a_card_exchange_blocks_by_ends_of_their_own(pair):
    assert_exchanged((str(CARD), str(CARD)), ExchangeLoad((pair,)), is_shared=True)


@SEVERAL
@pytest.mark.parametrize("decode", [(2, 1), (1, 2), (1, 1)])
@pytest.mark.parametrize("prefill", [(2, 1), (1, 2)])
def test_ranks_with_a_card_each_exchange_blocks(prefill, decode):
    load = ExchangeLoad(((prefill, decode),))
    assert_exchanged(devices_of_workers(NUM_CARDS), load, is_shared=False)
