"""Pools that hold one to three prompts: every request ends, and how much slower that is.

    python -m bench.tight_pools [--requests 1000] [--pools 1,1.5,2,3] [--transports shm,nixl]
        [--variant-requests 200] [--seed 1]

Two routers, two prefill and two decode workers run as real processes. A pool of 1.0 holds the
largest request exactly. The load (see bench.reliability.tight_load) is the same for each pool size
and for a large pool, the baseline of the ratios. Then, with one pool size, a prefill worker is
stopped and continued, stopped for good, killed, or joins under load. Every answer must equal that
of one worker alone; a request may also end with 503 and Retry-After. In the end no request, block
or handoff may be left. A worker that was stopped for good is checked after it is killed. Exits with
1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from bench.reliability.chaos_load import Known, Load
from bench.reliability.tight_load import Outcome, TightLoad, without_grammar_changes
from bench.tools.fleet import BenchFleet, FleetConfig, small_fleet
from bench.tools.paths import DEMO_MODEL

BLOCK = 16
NUM_TOKENS = 24
PROMPT_LENGTHS = [12, 480, 30, 60, 460, 90, 120, 150, 200, 480, 250, 300, 350, 400, 20, 470]
LARGEST = -(-(max(PROMPT_LENGTHS) + NUM_TOKENS) // BLOCK)
"""Blocks of the largest request."""
LARGE = 32.0
VARIANT_POOL = 1.5
STOPPED_S = 6.0
_FLAGS = (f"--block-size={BLOCK}", "--peer-silence-s=2", "--itl-target-ms=200")


def config_of(model: str, pool: float, transport: str) -> FleetConfig:
    """Two processes of each role, whose pools hold `pool` times the largest request."""
    config = small_fleet(model, round(pool * LARGEST))
    flags = (*config.worker_flags, *_FLAGS, f"--transport={transport}")
    return replace(config, worker_flags=flags)


async def learn(model: str, seed: int, console: Console) -> list[Known]:
    """The answers of one worker that does everything alone, with a large pool."""
    config = replace(config_of(model, LARGE, "shm"), num_routers=1, num_prefill=0, num_decode=1)
    with BenchFleet(config) as fleet:
        url = fleet.url("router-1")
        load = Load(model, lambda: {"router-1": url}, seed)
        await load.learn(PROMPT_LENGTHS, NUM_TOKENS)
        known = await without_grammar_changes(model, load.known, url)
    longest = max(len(each.prompt) for each in known)
    console.print(f"{len(known)} known answers, the longest prompt has {longest} tokens")
    return known


def stop_and_continue(fleet: BenchFleet) -> None:
    """A prefill worker stands still for long enough to count as silent, and goes on."""
    fleet.signal("prefill-1", signal.SIGSTOP)
    time.sleep(STOPPED_S)
    fleet.signal("prefill-1", signal.SIGCONT)


def stop_for_good(fleet: BenchFleet) -> None:
    """A prefill worker stands still until the load is over."""
    fleet.signal("prefill-1", signal.SIGSTOP)


def kill(fleet: BenchFleet) -> None:
    """A prefill worker ends at once, and is started again."""
    fleet.signal("prefill-1", signal.SIGKILL)
    fleet.wait_end("prefill-1", 10)
    fleet.start("prefill-1")


def join(fleet: BenchFleet) -> None:
    """A third prefill worker joins."""
    fleet.start("prefill-3")


VARIANTS: dict[str, Callable[[BenchFleet], None]] = {
    "stopped and continued": stop_and_continue,
    "stopped for good": stop_for_good,
    "killed": kill,
    "joining under load": join,
}


async def run(
    fleet: BenchFleet,
    load: TightLoad,
    num_requests: int,
    fault: Callable[[BenchFleet], None] | None = None,
) -> tuple[Outcome, int]:
    """The load on a fleet, with a fault in its midst; its outcome, and what is left at the end."""
    urls = [fleet.url(name) for name in fleet.names("router")]
    running = asyncio.create_task(load.run(lambda: urls, num_requests))
    if fault is not None:
        await asyncio.sleep(1.0)
        await asyncio.to_thread(fault, fleet)
    outcome = await running
    if fault is stop_for_good:
        fleet.signal("prefill-1", signal.SIGKILL)
        fleet.wait_end("prefill-1", 10)
        await asyncio.sleep(3.0)  # its lease ends, and the router forgets it
    return outcome, await asyncio.to_thread(fleet.left_over)


class Report:
    """The table of all runs."""

    def __init__(self, num_clients: int) -> None:
        self.failures: list[str] = []
        self._num_clients = num_clients
        self._table = Table(title="tight pools")
        for name in ("transport", "pool", "requests", "503", "errors", "wrong", "left"):
            self._table.add_column(name, justify="left" if name == "transport" else "right")
        for name in ("tokens/s", "of large", "wait p50 / p99 s", "p99 / work ahead"):
            self._table.add_column(name, justify="right")

    def add(self, transport: str, what: str, outcome: Outcome, left: int, base: Outcome) -> None:
        """One run; `base` is the same load on large pools."""
        ended = outcome.finished + outcome.aborted
        median, last = outcome.wait_percentiles()
        ahead = self._num_clients * outcome.seconds / max(1, ended)  # Little's law
        self._table.add_row(
            transport,
            what,
            str(ended),
            str(outcome.refused),
            str(len(outcome.errors)),
            str(outcome.wrong),
            str(left),
            f"{outcome.tokens_per_s:,.0f}",
            f"{outcome.tokens_per_s / base.tokens_per_s:.2f}x",
            f"{median:.2f} / {last:.2f}",
            f"{last / ahead:.1f}x",
        )
        if not outcome.is_clean or left:
            self.failures.append(f"{transport}, {what}: {outcome.errors[:3]}, {left} left")

    def print(self, console: Console) -> None:
        """The table and what went wrong."""
        console.print(self._table)
        for failure in self.failures:
            console.print(f"failed: {failure}", markup=False)


async def measure(arguments: argparse.Namespace, console: Console) -> Report:
    """All runs, one after the other."""
    known = await learn(arguments.model, arguments.seed, console)
    load = TightLoad(arguments.model, known, arguments.clients, arguments.seed)
    report = Report(arguments.clients)
    for transport in arguments.transports.split(","):
        with BenchFleet(config_of(arguments.model, LARGE, transport)) as fleet:
            base, left = await run(fleet, load, arguments.requests)
        report.add(transport, "large", base, left, base)
        for pool in map(float, filter(None, arguments.pools.split(","))):
            with BenchFleet(config_of(arguments.model, pool, transport)) as fleet:
                outcome, left = await run(fleet, load, arguments.requests)
            report.add(transport, f"{pool:g}", outcome, left, base)
            console.print(f"{transport}, {pool:g}: {outcome.finished} finished, {left} left")
        for name, fault in VARIANTS.items() if arguments.variant_requests else ():
            with BenchFleet(config_of(arguments.model, VARIANT_POOL, transport)) as fleet:
                outcome, left = await run(fleet, load, arguments.variant_requests, fault)
            report.add(transport, f"{VARIANT_POOL:g}, {name}", outcome, left, base)
            console.print(f"{transport}, {name}: {outcome.finished} finished, {left} left")
    return report


def main(argv: list[str]) -> int:
    """Run and print the table; 0 if every request ended correctly or with a proper refusal."""
    parser = argparse.ArgumentParser(prog="python -m bench.tight_pools", description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--variant-requests", type=int, default=200)
    parser.add_argument("--pools", default="1,1.5,2,3")
    parser.add_argument("--transports", default="shm,nixl")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    console = Console(soft_wrap=True)
    report = asyncio.run(measure(arguments, console))
    report.print(console)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
