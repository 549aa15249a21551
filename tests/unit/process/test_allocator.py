"""Large blocks that are freed leave the process, also when small ones were made after them."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
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


def kept_bytes(told: bool) -> int:
    command = [sys.executable, "-c", PROGRAM.format(told=told)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_freed_blocks_leave_the_process():
    assert kept_bytes(told=False) > 8 << 20, "what glibc does untold has changed"
    assert kept_bytes(told=True) < 2 << 20
