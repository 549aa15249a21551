"""Which card each rank of a worker computes on, and whether the cards are enough for its model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch

from engine.device import pick_device
from protocol.errors import ConfigError
from worker.settings import WorkerSettings

_WEIGHTS = (".safetensors", ".gguf")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Cards(Protocol):
    """The cards that this process sees."""

    def count(self) -> int:
        """The number of cards."""

    def total_bytes(self, index: int) -> int:
        """The memory of a card."""


class TorchCards:
    """See Cards."""

    def count(self) -> int:
        """See Cards."""
        return torch.cuda.device_count()

    def total_bytes(self, index: int) -> int:
        """See Cards."""
        return int(torch.cuda.get_device_properties(index).total_memory)


def devices_of_ranks(settings: WorkerSettings, folder: Path, cards: Cards) -> tuple[str, ...]:
    """A card for each rank, by their numbers; none on a CPU, whose ranks share its memory. Raises
    ConfigError."""
    device = pick_device(settings.device)
    if device.type != "cuda":
        return ()
    if settings.kv_checksum:
        raise ConfigError(
            f"kv_checksum: no process of a worker of {settings.num_ranks} cards has whole KV "
            "blocks; leave it out"
        )
    devices = cards_of_ranks(device.index or 0, settings.num_ranks, cards)
    check_share(folder, devices, cards)
    return devices


def cards_of_ranks(first: int, num_ranks: int, cards: Cards) -> tuple[str, ...]:
    """A card for each rank, by their numbers: one after the other from card `first` on. Raises
    ConfigError if there are too few."""
    found = cards.count()
    if first + num_ranks > found:
        named = f"{_VISIBLE} is {os.environ[_VISIBLE]}" if _VISIBLE in os.environ else "all of them"
        place = f" from cuda:{first} on" if first else ""
        raise ConfigError(
            f"tensor_parallel and pipeline_parallel ask for {num_ranks} cards{place}, and torch "
            f"sees {found} ({named}): lower them, or let the worker see more cards"
        )
    return tuple(f"cuda:{first + rank}" for rank in range(num_ranks))


def check_share(folder: Path, devices: tuple[str, ...], cards: Cards) -> None:
    """Check, before anything is loaded, that a rank's part of the weights, with its size in the
    files, fits its card. Raises ConfigError."""
    files = [each for each in folder.iterdir() if each.suffix in _WEIGHTS]
    share = sum(each.stat().st_size for each in files) // len(devices)
    for device in devices:
        total = cards.total_bytes(int(device.removeprefix("cuda:")))
        if share > total:
            raise ConfigError(
                f"each of {len(devices)} ranks has {share / 1e9:.0f} GB of weights, and {device} "
                f"has {total / 1e9:.0f} GB of memory: use more ranks (tensor_parallel, "
                "pipeline_parallel), or weights of fewer bits"
            )
