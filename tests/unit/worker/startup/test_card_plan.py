"""Which cards a worker's ranks take, with cards that a test makes up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import ConfigError
from worker.settings import WorkerSettings
from worker.startup import card_plan
from worker.startup.card_plan import cards_of_ranks, check_share, devices_of_ranks

GB = 10**9


class MadeUp:
    def __init__(self, *total_bytes: int) -> None:
        self._total_bytes = total_bytes

    def count(self) -> int:
        return len(self._total_bytes)

    def total_bytes(self, index: int) -> int:
        return self._total_bytes[index]


FOUR = MadeUp(80 * GB, 80 * GB, 80 * GB, 24 * GB)


@pytest.mark.parametrize(
    ("first", "num_ranks", "cards"),
    [
        (0, 2, ("cuda:0", "cuda:1")),
        (0, 4, ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        (2, 2, ("cuda:2", "cuda:3")),
        (3, 1, ("cuda:3",)),
    ],
)
def test_each_rank_has_a_card_from_the_first_one_on(
    first: int, num_ranks: int, cards: tuple[str, ...]
) -> None:
    assert cards_of_ranks(first, num_ranks, FOUR) == cards


@pytest.mark.parametrize(
    ("first", "num_ranks", "visible", "said"),
    [
        (0, 8, None, "ask for 8 cards, and torch sees 4 (all of them): lower them"),
        (3, 2, None, "ask for 2 cards from cuda:3 on, and torch sees 4"),
        (0, 5, "0,1,2,3", "torch sees 4 (CUDA_VISIBLE_DEVICES is 0,1,2,3)"),
    ],
)
def test_too_few_cards_are_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, first: int, num_ranks: int, visible: str | None, said: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError) as error:
        cards_of_ranks(first, num_ranks, FOUR)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_share_of_the_weights_has_to_fit_each_card(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 150), ("b.safetensors", 50), ("notes.txt", 400)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size * GB)  # sparse
    check_share(tmp_path, ("cuda:0", "cuda:1", "cuda:2"), FOUR)
    with pytest.raises(
        ConfigError, match="each of 2 ranks has 100 GB of weights, and cuda:1 has 80 GB"
    ):
        check_share(tmp_path, ("cuda:1", "cuda:2"), FOUR)
    with pytest.raises(
        ConfigError, match="each of 4 ranks has 50 GB of weights, and cuda:3 has 24 GB"
    ):
        check_share(tmp_path, ("cuda:0", "cuda:1", "cuda:2", "cuda:3"), FOUR)


def settings(device: str, **others: Any) -> WorkerSettings:
    return WorkerSettings(
        model="m",
        redis_url="redis://127.0.0.1:1",
        cluster_secret="a secret of sixteen",
        device=device,
        tensor_parallel=2,
        **others,
    )


def test_ranks_have_cards_only_on_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert devices_of_ranks(settings("cpu"), tmp_path, FOUR) == ()
    monkeypatch.setattr(card_plan, "pick_device", torch.device)
    assert devices_of_ranks(settings("cuda:1"), tmp_path, FOUR) == ("cuda:1", "cuda:2")
    with pytest.raises(ConfigError, match="ask for 2 cards, and torch sees 1"):
        devices_of_ranks(settings("cuda"), tmp_path, MadeUp(GB))
    with pytest.raises(ConfigError, match="kv_checksum: no process of a worker of 2 cards"):
        devices_of_ranks(settings("cuda", kv_checksum=True), tmp_path, FOUR)
