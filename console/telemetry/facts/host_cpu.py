"""How much CPU each process of the fleet gets, and which machines starve processes.

Owns, by process, the totals of the last `WINDOW_S` seconds: workers report theirs as counters, the
router reads its own. Processes of one machine are judged together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from socket import gethostname
from typing import NamedTuple

from console.doctor.facts import HostFacts
from process.host_load import CpuTotals
from process.process_watch import machine_name
from router.fleet.worker import Worker

WINDOW_S = 12
ROUTER = "router"


class _Sample(NamedTuple):
    at_us: int
    cpu: CpuTotals


class HostWatch:
    """The samples by process."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[_Sample]] = {}
        self._machines: dict[str, tuple[str, str]] = {}  # machine and host, by process

    def sample(self, workers: Iterable[Worker], own: CpuTotals, now_us: int) -> None:
        """Take the totals of all processes; call it once per second."""
        self._machines = {ROUTER: (machine_name(), gethostname())}
        self._add(ROUTER, own, now_us)
        for worker in workers:
            if worker.stats is None or "cpu_us" not in worker.stats.counters:
                continue
            info = worker.info
            process = f"{info.worker_id}/{info.incarnation}"
            self._machines[process] = (info.machine, info.host)
            self._add(process, _totals(worker.stats.counters), now_us)
        for gone in self._samples.keys() - self._machines.keys():
            del self._samples[gone]

    def facts(self) -> tuple[HostFacts, ...]:
        """Every machine with known totals."""
        by_machine: dict[str, list[str]] = {}
        for process, (machine, host) in self._machines.items():
            by_machine.setdefault(machine or host, []).append(process)
        found = [self._host_facts(processes) for processes in by_machine.values()]
        return tuple(each for each in found if each is not None)

    def _add(self, process: str, cpu: CpuTotals, now_us: int) -> None:
        samples = self._samples.setdefault(process, deque())
        if samples and samples[-1].cpu == cpu:
            return
        samples.append(_Sample(now_us, cpu))
        while len(samples) > 2 and samples[1].at_us <= now_us - WINDOW_S * 1e6:
            samples.popleft()

    def _host_facts(self, processes: list[str]) -> HostFacts | None:
        ran = waited = throttled = busy = 0.0
        known = []
        for process in processes:
            samples = self._samples.get(process)
            if samples is None or len(samples) < 2:
                continue
            first, last = samples[0], samples[-1]
            seconds = (last.at_us - first.at_us) / 1e6
            ran += (last.cpu.ran_us - first.cpu.ran_us) / 1e6 / seconds
            waited += (last.cpu.waited_us - first.cpu.waited_us) / 1e6 / seconds
            limit_us = last.cpu.throttled_us - first.cpu.throttled_us
            throttled = max(throttled, limit_us / 1e6 / seconds)
            busy = max(busy, (last.cpu.busy_us - first.cpu.busy_us) / 1e6 / seconds)
            known.append(process.partition("/")[0])
        if not known:
            return None
        return HostFacts(
            name=self._machines[processes[0]][1],
            waiting_share=waited / (ran + waited) if ran + waited else 0.0,
            busy_cores=busy,
            own_cores=ran,
            throttled_share=min(1.0, throttled),
            processes=tuple(sorted(known)),
        )


def _totals(counters: Mapping[str, int]) -> CpuTotals:
    return CpuTotals(
        ran_us=counters["cpu_us"],
        waited_us=counters.get("cpu_wait_us", 0),
        throttled_us=counters.get("cpu_throttled_us", 0),
        busy_us=counters.get("host_cpu_us", 0),
        pressed_us=counters.get("host_pressure_us", 0),
    )
