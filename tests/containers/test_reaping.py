"""`baton up` as PID 1 takes in the processes that its children have left behind."""

from __future__ import annotations

import subprocess

from tests.containers.sandbox import environment, in_namespaces, needs_namespaces, python
from tests.paths import ROOT

pytestmark = needs_namespaces()

ORPHANS = """
import os, subprocess, time
from process.orphans import reap_orphans
own = subprocess.Popen(["sh", "-c", "exit 7"])
for _ in range(3):  # each leaves a child behind, which then ends
    subprocess.run(["sh", "-c", "sh -c 'exec 1>&-; sleep 0.1' & exit 0"], check=True)
num_reaped = 0
while num_reaped < 3:
    num_reaped += reap_orphans({own.pid} if own.returncode is None else ())
    own.poll()
    time.sleep(0.01)
print(os.getpid(), own.returncode, num_reaped)
"""


def test_orphans_are_reaped_and_own_children_are_not() -> None:
    done = subprocess.run(
        in_namespaces(python(ORPHANS)), env=environment(), cwd=ROOT,
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "7", "3"]
