"""Memory in huge pages: tensors like any other, side by side, and gone when they are."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import psutil
import pytest
import torch

from engine.cpu import huge_pages
from engine.cpu.huge_pages import HugePages

MIB = 1 << 20


def test_zeros_that_can_be_written():
    tensor = huge_pages.zeros((3, 5, 7), torch.bfloat16)
    assert tensor.shape == (3, 5, 7)
    assert tensor.dtype == torch.bfloat16
    assert tensor.is_contiguous()
    assert not tensor.any()
    tensor[2, 4, 6] = 1
    assert tensor.sum() == 1


def test_tensors_lie_side_by_side_and_do_not_overlap():
    memory = HugePages()
    shapes = [(5,), (1000, 1001), (0, 4), (40 * MIB,), (3, 3), (64,)]
    tensors = [memory.empty(shape, torch.int8) for shape in shapes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert (tensor == number).all()
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
    assert tensors[1].data_ptr() - tensors[0].data_ptr() == 64


@pytest.mark.skipif(sys.platform != "linux", reason="the maps of /proc are Linux's")
def test_the_system_is_asked_for_huge_pages():
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages to lend")
    for tensor in (
        huge_pages.zeros((MIB,), torch.float32),
        HugePages().empty((MIB,), torch.float32),
    ):
        assert "hg" in flags_of_the_mapping(tensor.data_ptr())


def test_memory_goes_with_the_last_tensor_in_it():
    memory = HugePages()
    tensors = [memory.empty((60 * MIB,), torch.int8).fill_(1) for _ in range(4)]
    del memory
    gc.collect()
    held = psutil.Process().memory_info().rss
    del tensors
    gc.collect()
    assert held - psutil.Process().memory_info().rss > 200 * MIB


def flags_of_the_mapping(address: int) -> list[str]:
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(each, 16) for each in first.split("-"))
            within = start <= address < end
        elif within and first == "VmFlags:":
            return rest
    raise AssertionError("no mapping holds the address")
