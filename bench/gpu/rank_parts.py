"""The parts of bench.gpu for workers of several ranks, on one card and on several."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.card import Row
from bench.tools.checkpoints import served_checkpoint


def ranks(device: torch.device) -> Iterator[Row]:
    """Two ranks on this card, whose tokens count and not their speed, and sums in a graph."""
    from bench.gpu.ranks import RankLoad, check_captured_sums, check_ranks

    yield from check_captured_sums(device)
    two_layouts = RankLoad(layouts=((2, 1), (1, 2)))
    yield from check_ranks(served_checkpoint("M3"), [str(device)] * 2, two_layouts)


def cards(device: torch.device) -> Iterator[Row]:
    """Ranks with a card each; says so where there are too few."""
    from bench.gpu.ranks import RankLoad, check_ranks, layouts_on

    found = torch.cuda.device_count()
    if found < 2:
        yield _too_few_cards("cards", found)
        return
    devices = [f"cuda:{index}" for index in range(found)]
    load = RankLoad(layouts_on(found))
    yield from check_ranks(
        served_checkpoint("M3"), devices, load, ways=("nccl", "symmetric", "auto")
    )


def exchange(device: torch.device) -> Iterator[Row]:
    """Blocks between workers of two ranks that share this card, each with an end of its own."""
    from bench.gpu.exchange import ExchangeLoad, check_exchange

    devices = str(device), str(device)
    yield from check_exchange(
        "exchange", served_checkpoint("M3"), devices, ExchangeLoad(), is_shared=True
    )


def exchange_cards(device: torch.device) -> Iterator[Row]:
    """Blocks between workers whose ranks have a card each; says so where there are too few."""
    from bench.gpu.exchange import ON_CARDS, ExchangeLoad, check_exchange, devices_of_workers

    found = torch.cuda.device_count()
    if found < 2:
        yield _too_few_cards("exchange-cards", found)
        return
    devices, load = devices_of_workers(found), ExchangeLoad(ON_CARDS)
    yield from check_exchange(
        "exchange-cards", served_checkpoint("M3"), devices, load, is_shared=False
    )


def _too_few_cards(part: str, found: int) -> Row:
    return Row(part, "cards", found, "cards", goal="2", note="this part needs 2 or more")
