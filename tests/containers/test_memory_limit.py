"""A worker under a container's memory limit: the host's free memory is not its own."""

from __future__ import annotations

import subprocess

from tests.containers.sandbox import environment, in_group, memory_group, python
from tests.paths import ROOT

MIB = 1 << 20

FREE = """
from engine.host_memory import available_memory
before = available_memory()
held = bytearray(100 << 20)
held[::4096] = b"x" * len(held[::4096])
print(before, available_memory())
"""

KILLED = """
import subprocess, sys
from engine.host_memory import oom_kills
before = oom_kills()
hungry = "open('/proc/self/oom_score_adj', 'w').write('1000'); print(len(b'x' * (1 << 30)))"
status = subprocess.run([sys.executable, "-c", hungry]).returncode
print(status, oom_kills() - before)
"""


def printed_with_200_mib(code: str) -> list[str]:
    """The words that this code prints in a group of 200 MiB."""
    with memory_group(200 * MIB) as group:
        done = subprocess.run(
            in_group(group, python(code)),
            env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    return done.stdout.split()


def test_free_memory_is_what_the_group_has_left() -> None:
    before, after = map(int, printed_with_200_mib(FREE))
    assert 100 * MIB < before < 200 * MIB
    assert before - 130 * MIB < after < before - 70 * MIB


def test_a_child_that_the_kernel_kills_for_lack_of_memory_is_counted() -> None:
    assert printed_with_200_mib(KILLED) == ["-9", "1"]
