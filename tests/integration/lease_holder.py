"""A process that holds a worker's lease and does nothing else, for tests that stop or kill it.

    python -m tests.integration.lease_holder REDIS_URL CLUSTER WORKER_ID INCARNATION LEASE_S

Prints a line when it is registered, and renews its lease all the time. Prints why and ends with
status 2 if its id is held by another.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from process.process_watch import machine_name
from process.store.worker_lease import WorkerLease
from tests.paths import ROOT
from tests.registration import registration

LONG_S = 60.0
"""A lease that no busy machine lets end."""


def renewed(*leases: WorkerLease) -> bool:
    """Let leases ask the store now, not after a third of their time. Returns True."""
    for lease in leases:
        lease.note_start({})  # this changes nothing, and is announced at once
    return True


@contextmanager
def lease_holder(
    redis_url: str, cluster: str, worker_id: str, incarnation: str, lease_s: float
) -> Iterator[subprocess.Popen[str]]:
    """A lease holder's process, once it is registered. It is killed at the end if it still runs."""
    arguments = (redis_url, cluster, worker_id, incarnation, str(lease_s))
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.lease_holder", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "registered\n"
            yield process
        finally:
            process.kill()


def main(redis_url: str, cluster: str, worker_id: str, incarnation: str, lease_s: str) -> int:
    info = registration(worker_id, incarnation, machine=machine_name(), pid=os.getpid())
    lease = WorkerLease(redis_url, cluster, info, float(lease_s))
    lease.start()
    if lease.wait_registered(60):
        print("registered", flush=True)
    while renewed(lease) and lease.refusal is None:
        if lease.has_lapsed:
            lease.register_again(f"{incarnation} again")
        time.sleep(0.02)
    print(lease.refusal, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
