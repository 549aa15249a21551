"""What is there when a process begins to serve is never looked through again."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from process.garbage_collector import ALLOCATIONS, spare_the_collector

class Node:
    pass

kept = [[index] for index in range(1000)]
left = Node()
left.itself = left
del left
spare_the_collector()
assert not any(isinstance(each, Node) for each in gc.get_objects()), "cycles were collected before"
assert gc.get_freeze_count() > 1000
assert not any(each is kept for each in gc.get_objects())
assert gc.get_threshold()[0] == ALLOCATIONS
later = Node()
later.itself = later
del later
assert gc.collect() > 0, "cycles made since are still found"
"""


def test_a_look_is_at_what_came_later():
    assert subprocess.run([sys.executable, "-c", PROGRAM], check=False).returncode == 0
