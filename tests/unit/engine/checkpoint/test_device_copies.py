"""Weights through two buffers: nothing is overwritten that a device still reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.checkpoint.device_copies import DirectCopies, StagedCopies, copies_to


class LateDevice:
    """Starts no copy before it is waited for, as a card may, and counts what is under way."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], object]] = []
        self._num_done = 0
        self.most_under_way = 0

    def start(self, place: torch.Tensor, source: torch.Tensor) -> None:
        self._queue.append(lambda: place.copy_(source))
        self.most_under_way = max(self.most_under_way, len(self._queue) - self._num_done)

    def fence(self) -> LateFence:
        return LateFence(self, len(self._queue))

    def run_until(self, number: int) -> None:
        while self._num_done < number:
            self._queue[self._num_done]()
            self._num_done += 1


class LateFence:
    def __init__(self, device: LateDevice, number: int) -> None:
        self._device = device
        self._number = number

    def is_done(self) -> bool:
        raise NotImplementedError

    def wait(self) -> None:
        self._device.run_until(self._number)


def staged(device: LateDevice, num_bytes: int) -> StagedCopies:
    buffers = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2)]
    return StagedCopies(buffers, device.fence, device.start)


@pytest.mark.parametrize("num_bytes", [64, 120, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_tensor_arrives_whole(num_bytes: int, dtype: torch.dtype) -> None:
    device = LateDevice()
    copies = staged(device, num_bytes)
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (1, 1), (33,), (0, 4), (12, 2), (2, 3, 4)]
    sources = [torch.randn(shape, generator=generator).to(torch.float32) for shape in shapes]
    sources.append(torch.randn((9, 10), generator=generator)[:, 3:8])  # as a shard's inputs
    places = [torch.full(each.shape, torch.nan, dtype=dtype) for each in sources]
    expected = [each.to(dtype, copy=True) for each in sources]
    for place, source in zip(places, sources, strict=True):
        copies.copy(place, source)
        source.fill_(torch.nan)  # its file's pages may go
    copies.finish()
    for place, wanted in zip(places, expected, strict=True):
        assert torch.equal(place, wanted)
    assert device.most_under_way == 2  # the device takes one buffer while the other is filled


def test_a_row_that_fits_no_buffer_is_copied_directly() -> None:
    device = LateDevice()
    copies = staged(device, 16)
    place, source = torch.zeros((2, 100)), torch.randn((2, 100))
    copies.copy(place, source)
    assert torch.equal(place, source)
    assert device.most_under_way == 0


def test_a_cpu_copies_directly() -> None:
    copies = copies_to(torch.device("cpu"))
    assert isinstance(copies, DirectCopies)
    place, source = torch.zeros(3, dtype=torch.bfloat16), torch.tensor([1.0, 2.0, 3.0])
    copies.copy(place, source)
    copies.finish()
    assert place.tolist() == [1.0, 2.0, 3.0]
