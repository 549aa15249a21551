"""The pool's memory, whatever the environment says of torch's allocator; with a stand-in for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.gpu.shareable_memory import TORCH, shareable_zeros, why_not_shareable

CPU = torch.device("cpu")


class Allocator:
    """Notes the settings; its one segment is expandable if they were so when it was looked at."""

    def __init__(self, settings: str = "", backend: str = "native") -> None:
        self.now = settings
        self.changes: list[str] = []
        self._backend = backend
        self.tensor: torch.Tensor | None = None
        self.is_expandable = False

    def settings(self) -> str:
        return self.now

    def change(self, settings: str) -> None:
        self.now = settings
        self.changes.append(settings)

    def backend(self) -> str:
        return self._backend

    def segments(self) -> list[dict[str, Any]]:
        assert self.tensor is not None
        near = self.tensor.data_ptr()
        return [
            {"address": near - 4096, "total_size": 4096, "is_expandable": True},
            {"address": near - 64, "total_size": 128, "is_expandable": self.is_expandable},
        ]


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ("", []),
        ("max_split_size_mb:128", []),
        ("expandable_segments:True", ["expandable_segments:False"]),
        (
            "max_split_size_mb:128,expandable_segments:True",
            ["max_split_size_mb:128,expandable_segments:False"],
        ),
    ],
)
def test_expandable_segments_are_off_while_the_pool_is_allocated(
    settings: str, changes: list[str]
) -> None:
    allocator = Allocator(settings)
    tensor = shareable_zeros((3, 5), torch.bfloat16, CPU, allocator)
    assert (tensor.shape, tensor.dtype, tensor.any().item()) == ((3, 5), torch.bfloat16, False)
    assert allocator.changes == changes + [settings] * len(changes)
    assert allocator.now == settings


def test_the_settings_are_put_back_if_there_is_no_room() -> None:
    allocator = Allocator("expandable_segments:True")
    with pytest.raises(RuntimeError):
        shareable_zeros((1 << 60,), torch.uint8, CPU, allocator)
    assert allocator.now == "expandable_segments:True"


def test_memory_that_others_cannot_open_is_told() -> None:
    allocator = Allocator()
    allocator.tensor = shareable_zeros((64,), torch.uint8, CPU, allocator)
    assert why_not_shareable(allocator.tensor, allocator) == ""
    allocator.is_expandable = True
    assert "expandable segment" in why_not_shareable(allocator.tensor, allocator)
    other = torch.zeros(1 << 21, dtype=torch.uint8)
    assert "not in torch's memory" in why_not_shareable(other, allocator)
    asynchronous = Allocator(backend="cudaMallocAsync")
    assert "cudaMallocAsync" in why_not_shareable(allocator.tensor, asynchronous)


def test_torch_has_the_settings_that_are_changed() -> None:
    before = TORCH.settings()
    TORCH.change("expandable_segments:True")
    try:
        assert "expandable_segments:True" in TORCH.settings()
        shareable_zeros((1,), torch.uint8, CPU)
        assert "expandable_segments:True" in TORCH.settings()
    finally:
        TORCH.change(before)
