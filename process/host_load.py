"""How much of its CPU a process gets, and how busy its machine is, from Linux's own counters.

Of each thread, the kernel knows how long it ran and how long it was runnable and waited for a core
(`schedstat`). Machine-wide are the time that all cores were busy (`/proc/stat`) and the time that
some process waited for a core (pressure stall information). A control group with a CPU limit knows
how long it was throttled. All are totals in microseconds that only grow; those that a system does
not report stay 0.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path

PERIOD_S = 2.0
"""Reading takes about a millisecond, so it happens at most once in this time."""
_BUSY = (0, 1, 2, 5, 6)
"""Columns of `/proc/stat`: user, nice, system, irq, softirq."""


@dataclass(frozen=True, slots=True)
class CpuTotals:
    """Times in microseconds: this process `ran`, `waited` for a core, and was `throttled` by its
    limit. All cores of the machine together were `busy`, and at least one process of the machine
    was `pressed` for a core."""

    ran_us: int = 0
    waited_us: int = 0
    throttled_us: int = 0
    busy_us: int = 0
    pressed_us: int = 0


class HostLoad:
    """Reads the totals. Threads that ended stay counted. `proc` and `cgroup` are the file systems
    of those names."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroup = proc, cgroup
        self._threads: dict[str, tuple[int, int]] = {}
        self._ended_ns = (0, 0)
        self._totals = CpuTotals()
        self._read_at = float("-inf")

    def totals(self, now: float) -> CpuTotals:
        """The totals, at most `PERIOD_S` old by `now`, which is monotonic."""
        if now - self._read_at >= PERIOD_S:
            self._read_at = now
            read = self._read()  # 0 for what cannot be read now, as without room for an open file
            self._totals = CpuTotals(*map(max, astuple(self._totals), astuple(read)))
        return self._totals

    def _read(self) -> CpuTotals:
        threads = self._read_threads()
        for name in self._threads.keys() - threads.keys():
            self._ended_ns = _plus(self._ended_ns, self._threads[name])
        self._threads = threads
        ran_ns, waited_ns = self._ended_ns
        for each in threads.values():
            ran_ns, waited_ns = _plus((ran_ns, waited_ns), each)
        return CpuTotals(
            ran_us=ran_ns // 1000,
            waited_us=waited_ns // 1000,
            throttled_us=_value_of(_text(self._cgroup / "cpu.stat"), "throttled_usec "),
            busy_us=self._busy_us(),
            pressed_us=_value_of(_text(self._proc / "pressure" / "cpu"), "total="),
        )

    def _read_threads(self) -> dict[str, tuple[int, int]]:
        """Nanoseconds that each thread of this process ran and waited."""
        found = {}
        tasks = self._proc / "self" / "task"
        try:
            names = os.listdir(tasks)
        except OSError:
            return self._threads
        for name in names:
            fields = _text(tasks / name / "schedstat").split()
            if len(fields) >= 2:
                found[name] = int(fields[0]), int(fields[1])
            elif name in self._threads:  # it has just ended, or no file can be opened now
                found[name] = self._threads[name]
        return found

    def _busy_us(self) -> int:
        fields = _text(self._proc / "stat").partition("\n")[0].split()[1:]
        if len(fields) <= max(_BUSY):
            return 0
        return sum(int(fields[each]) for each in _BUSY) * 1_000_000 // os.sysconf("SC_CLK_TCK")


def _plus(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    return first[0] + second[0], first[1] + second[1]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _value_of(text: str, name: str) -> int:
    """The first whole number after a name; 0 if there is none."""
    digits = text.partition(name)[2].split(maxsplit=1)
    return int(digits[0]) if digits and digits[0].isdecimal() else 0
