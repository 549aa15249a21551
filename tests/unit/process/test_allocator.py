"""Memory that is freed leaves the process, and the collector spares what a process starts with."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FREED_BLOCKS = """
import psutil
from process.allocator import give_back_large_blocks

def resident():
    return psutil.Process().memory_info().rss

if {told}:
    assert give_back_large_blocks()
before = resident()
for _ in range(2):  # glibc learns from the first blocks that are freed
    blocks, small = [], []
    for _ in range(64):  # what is small lies between, and stays
        blocks.append(bytearray(1 << 18))
        small.append(bytearray(5000))
    del blocks
print(resident() - before)
"""

SPARED = """
import gc
from process.allocator import ALLOCATIONS, spare_the_collector

class Node:
    pass

kept = [[index] for index in range(1000)]
left = Node()
left.itself = left
del left
spare_the_collector(70)
assert not any(isinstance(each, Node) for each in gc.get_objects()), "cycles were collected before"
assert gc.get_freeze_count() > 1000
assert not any(each is kept for each in gc.get_objects())
assert gc.get_threshold() == (ALLOCATIONS, 10, 70)
later = Node()
later.itself = later
del later
assert gc.collect() > 0, "cycles made since are still found"
"""


def kept_bytes(told: bool) -> int:
    command = [sys.executable, "-c", FREED_BLOCKS.format(told=told)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_freed_blocks_leave_the_process():
    assert kept_bytes(told=False) > 8 << 20, "what glibc does untold has changed"
    assert kept_bytes(told=True) < 2 << 20


def test_a_look_is_at_what_came_later():
    assert subprocess.run([sys.executable, "-c", SPARED], check=False).returncode == 0
