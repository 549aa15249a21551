"""Machines that starve the fleet, from the totals that processes report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from console.telemetry.facts.host_cpu import WINDOW_S, HostWatch
from process.host_load import CpuTotals
from process.process_watch import machine_name

SECOND = 1_000_000


def worker(name: str, machine: str, **counters: int) -> Any:
    info = SimpleNamespace(worker_id=name, incarnation="1", machine=machine, host="far")
    return SimpleNamespace(info=info, stats=SimpleNamespace(counters=counters))


def watch(share_waiting: float, machine: str = "another", throttled: float = 0.0) -> HostWatch:
    """A worker that could run all the time, beside an idle router, for the whole window."""
    made = HostWatch()
    for second in range(WINDOW_S + 3):
        made.sample(
            [
                worker(
                    "d1", machine, cpu_us=round(second * SECOND * (1 - share_waiting)),
                    cpu_wait_us=round(second * SECOND * share_waiting),
                    cpu_throttled_us=round(second * SECOND * throttled),
                    host_cpu_us=2 * second * SECOND,
                )
            ],
            CpuTotals(),
            (second + 1) * SECOND,
        )  # fmt: skip
    return made


def test_waiting_for_cores_is_a_share_of_the_time_a_process_could_run() -> None:
    (host,) = watch(0.4).facts()
    assert (host.name, host.processes) == ("far", ("d1",))
    assert (round(host.waiting_share, 2), round(host.own_cores, 2)) == (0.4, 0.6)
    assert round(host.busy_cores, 2) == 2.0
    assert host.throttled_share == 0.0


def test_a_limit_that_holds_a_process_up_is_told_apart() -> None:
    (host,) = watch(0.0, throttled=0.7).facts()
    assert (round(host.throttled_share, 2), host.waiting_share) == (0.7, 0.0)


def test_processes_of_one_machine_are_judged_together() -> None:
    made = watch(0.4, machine_name())
    made.sample([worker("d1", machine_name(), cpu_us=1)], CpuTotals(ran_us=5), 100 * SECOND)
    (host,) = made.facts()
    assert host.processes == ("d1", "router")


def test_a_worker_that_does_not_tell_is_not_judged() -> None:
    made = HostWatch()
    for second in range(5):
        made.sample([worker("d1", "another", steps=second)], CpuTotals(), second * SECOND)
    assert made.facts() == ()
