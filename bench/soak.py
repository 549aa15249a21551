"""Memory under steady load: does any process of a fleet grow?

    python -m bench.soak --minutes 30 [--seed 1] [--clients 6] [--warm-up 8]
    python -m bench.soak --mock [--turnovers 20]

Two routers, two prefill and two decode workers run as real processes; with `--mock` the workers
compute nothing, so that routers get fifty times as many requests. The warm-up ends after
`--warm-up` minutes, once every router has answered `--turnovers` times as many requests as it keeps
traces: then every bounded store is full, and the allocator has reached its working size. The
routers' word caches are filled at the start. Growth compares the median resident memory of the
first and last tenth after the warm-up. Exits with 1 unless each process grew by less than 2 % and
no request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench.reliability.soak_load import SoakLoad
from bench.router.mock_fleet import RouterFleet, RouterFleetConfig
from bench.tools.fleet import BenchFleet, small_fleet
from bench.tools.paths import DEMO_MODEL
from protocol.messages import Role

MAX_GROWTH = 0.02
TRACE_HISTORY = 1000  # the router's default
TURNOVERS = 4
NUM_BLOCKS = 512
MOCK_TOKENS = range(300, 900)
MOCK_CONTEXT = 4096
_PERIOD_S = 2.0
_COLUMNS = 6


@dataclass
class Memory:
    """Resident bytes of every process over time; `warm_at` is the first sample that counts."""

    seconds: list[float] = field(default_factory=list)
    samples: dict[str, list[int]] = field(default_factory=dict)
    warm_at: int | None = None

    def take(self, pids: dict[str, int], at_s: float) -> None:
        """Sample each process once. Raises psutil.NoSuchProcess if one has ended."""
        for name, pid in pids.items():
            resident = psutil.Process(pid).memory_info().rss
            self.samples.setdefault(name, []).append(resident)
        self.seconds.append(at_s)

    def line(self) -> str:
        """The last samples in MiB."""
        values = (f"{name} {taken[-1] / 2**20:.1f}" for name, taken in self.samples.items())
        return f"{self.seconds[-1] / 60:4.0f} min: " + ", ".join(values)

    def growth(self, name: str) -> float | None:
        """Growth from the first to the last tenth after the warm-up; None if that is too short."""
        if self.warm_at is None:
            return None
        counted = self.samples[name][self.warm_at :]
        tenth = len(counted) // 10
        if not tenth:
            return None
        first, last = counted[:tenth], counted[-tenth:]
        return statistics.median(last) / statistics.median(first) - 1


async def watch(
    fleet: BenchFleet, load: SoakLoad, memory: Memory, arguments: argparse.Namespace
) -> None:
    """Sample until the time is over and print a line every minute; set when the fleet is warm."""
    started, shown = time.monotonic(), 0.0
    urls = [fleet.url(name) for name in fleet.names("router")]
    while (passed := time.monotonic() - started) < 60 * arguments.minutes:
        memory.take(fleet.pids, passed)
        is_full = all(load.answered[url] > arguments.turnovers * arguments.traces for url in urls)
        if memory.warm_at is None and passed >= 60 * arguments.warm_up and is_full:
            memory.warm_at = len(memory.seconds) - 1
        if passed // 60 > shown // 60:
            shown = passed
            print(memory.line(), flush=True)
        await asyncio.sleep(_PERIOD_S)


async def run(fleet: BenchFleet, arguments: argparse.Namespace) -> tuple[SoakLoad, Memory, int]:
    """Run load and sampling side by side; returns the load, the samples and the leftover count."""
    urls = [fleet.url(name) for name in fleet.names("router")]
    load = SoakLoad(arguments.model, urls, arguments.seed)
    memory = Memory()
    await load.fill_word_caches()
    watching = asyncio.create_task(watch(fleet, load, memory, arguments))
    await load.run(arguments.clients, watching.done)
    await watching
    return load, memory, await asyncio.to_thread(fleet.left_over)


def report(memory: Memory) -> Table:
    """Resident MiB of each process over time, and its growth."""
    last = len(memory.seconds) - 1
    warm = memory.warm_at if memory.warm_at is not None else last
    shown = [0, *(warm + (last - warm) * part // (_COLUMNS - 1) for part in range(_COLUMNS))]
    table = Table(title="resident memory, MiB")
    table.add_column("process")
    for index in shown:
        table.add_column(f"{memory.seconds[index] / 60:.1f} min", justify="right")
    table.add_column("growth", justify="right")
    for name, samples in memory.samples.items():
        growth = memory.growth(name)
        cells = [f"{samples[index] / 2**20:.1f}" for index in shown]
        table.add_row(name, *cells, "-" if growth is None else f"{growth:+.2%}")
    return table


def is_steady(load: SoakLoad, memory: Memory, left: int) -> bool:
    """Whether every process stayed within the limit and every request was answered."""
    growths = [memory.growth(name) for name in memory.samples]
    grew = any(growth is None or growth >= MAX_GROWTH for growth in growths)
    return bool(growths) and not grew and not load.errors and not left


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--minutes", type=float, default=30.0, help="of load, warm-up included")
    parser.add_argument("--warm-up", type=float, default=8.0, help="minutes that do not count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--mock", action="store_true", help="workers that compute nothing")
    parser.add_argument("--turnovers", type=float, default=TURNOVERS, help="of the traces")
    parser.add_argument("--traces", type=int, default=TRACE_HISTORY, help="that each router keeps")
    return parser.parse_args(argv)


def _fleet(arguments: argparse.Namespace) -> BenchFleet:
    if not arguments.mock:
        return BenchFleet(small_fleet(arguments.model, NUM_BLOCKS))
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    # Mock workers report no cached blocks, so routers' expectations must expire soon.
    flags = ("--expected-cache-s=0.1",)
    return RouterFleet(
        RouterFleetConfig(
            Path(arguments.model), roles, list(MOCK_TOKENS), MOCK_CONTEXT, 2, router_flags=flags
        )
    )


def main(argv: list[str]) -> int:
    """Run and print the table; 0 if no process grew and no request failed."""
    arguments = parse(argv)
    with _fleet(arguments) as fleet:
        load, memory, left = asyncio.run(run(fleet, arguments))
    console = Console(width=120, soft_wrap=True)
    console.print(report(memory))
    warm = memory.warm_at
    warm_up = "never warm" if warm is None else f"warm after {memory.seconds[warm] / 60:.1f} min"
    console.print(
        f"{load.answered.total()} requests, {warm_up}; {dict(load.kinds)}; "
        f"{len(load.errors)} errors, {left} left over",
        markup=False,
    )
    for error in load.errors[:10]:
        console.print(f"error: {error}", markup=False)
    steady = is_steady(load, memory, left)
    console.print(f"verdict: {'steady' if steady else 'NOT steady'} (limit {MAX_GROWTH:.0%})")
    return 0 if steady else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
