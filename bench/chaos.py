"""Random faults under steady load; every stream must be the same as without faults.

    python -m bench.chaos [--faults 100 | --minutes 10] [--seed 1] [--model demo_model]
        [--clients 8] [--num-blocks 1024] [--transports shm,nixl] [--placement cache]
        [--prefill-ranks 1x1] [--decode-ranks 1x1]

Two routers, two prefill and two decode workers run as real processes. Faults: a worker or router
is killed; a worker is stopped until it counts as dead, then continued; a prefill worker is stopped
for good, and killed later; a worker is drained; one joins and leaves; one comes with the id of a
worker that lives; the store is killed and restarted empty; and, if possible (see
bench.reliability.connection_cut), a connection to a worker or to the store is cut. Faults come one
at a time; ended processes are restarted before the next. The longest request takes 124 blocks, so
that `--num-blocks 160` makes pools tight. With `--placement load`, a conversation's second turn
goes to a worker without its KV, so that workers fetch from each other amid the faults. Such a run
fails if there was no fetch, because it proves nothing. `--prefill-ranks 1x2` splits the model of
prefill workers over one rank in each of two stages; then a rank is killed, too, or stopped for
good, and its worker has to end by itself. The given minutes or faults are for each transport, which
gets a fleet of its own. Exits with 1 unless mismatches, duplicates, losses, errors and leaks are
all zero; a client that gets 503 with Retry-After asks again.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.reliability.chaos_load import Load, Tally
from bench.reliability.connection_cut import can_cut, connections_of, cut, listening_ports
from bench.reliability.rank_faults import Layout, RankFaults
from bench.tools.fleet import BenchFleet, small_fleet
from bench.tools.paths import DEMO_MODEL

ROLES = ("prefill", "decode")
PROMPT_LENGTHS = [5, 40, 120, 250, 400, 700, 1000, 1500, 90, 600, 330, 1900]
NUM_TOKENS = 48
STOPPED_S = 4.0
STOPPED_FOR_GOOD_S = 8.0
CUT_WAIT_S = 10.0


class Chaos:
    """Injects faults into a fleet, one after the other."""

    def __init__(
        self, fleet: BenchFleet, load: Load, rng: random.Random, split: Sequence[str] = ()
    ) -> None:
        """`split`: roles whose workers have several ranks."""
        self.faults: Counter[str] = Counter()
        self._fetched: dict[tuple[str, int], int] = {}  # tokens, by worker and process
        self._fleet = fleet
        self._load = load
        self._rng = rng
        self._ranks = RankFaults(fleet, rng)
        self._kinds: dict[str, Callable[[], None]] = {
            "prefill worker killed": lambda: self._kill("prefill"),
            "decode worker killed": lambda: self._kill("decode"),
            "prefill worker stopped": lambda: self._stop("prefill"),
            "prefill worker stopped for good": self._stop_for_good,
            "prefill worker joined and left": self._join,
            "newcomer with a live worker's id": self._take_id,
            "decode worker stopped": lambda: self._stop("decode"),
            "worker drained": self._drain,
            "store killed": self._kill_store,
            "router killed": lambda: self._kill("router"),
        }
        for role in split:
            self._kinds |= {
                f"rank of a {role} worker killed": partial(self._ranks.kill, role),
                f"rank of a {role} worker stopped": partial(self._ranks.stop, role),
            }
        if can_cut():
            self._kinds |= {
                "router's connection to a worker cut": lambda: self._cut("router", "worker"),
                "connection between workers cut": lambda: self._cut("decode", "prefill"),
                "connection to the store cut": lambda: self._cut("worker", "store"),
            }

    def routers(self) -> dict[str, str]:
        """The URLs of the routers that should be serving."""
        names = [each for each in self._fleet.names("router") if each not in self._load.doomed]
        return {name: self._fleet.url(name) for name in names}

    @property
    def fetched_tokens(self) -> int:
        """Tokens that workers fetched from each other, as far as their reports showed."""
        return sum(self._fetched.values())

    def note_fetches(self) -> None:
        """Read the reports of the workers' present processes."""
        for name, worker in self._fleet.workers(self._fleet.names("router")[0]).items():
            fetched = worker["counters"].get("fetched_tokens", 0)
            self._fetched[name, worker["pid"]] = fetched

    def run(self, until: float, most: float = math.inf) -> None:
        """Inject at most `most` faults until `until` (of `time.monotonic`). At the end the fleet is
        complete."""
        order: list[str] = []
        while time.monotonic() < until and self.faults.total() < most:
            if not order:
                order = self._rng.sample(list(self._kinds), len(self._kinds))
            kind = order.pop()
            time.sleep(self._rng.uniform(0.2, 1.5))
            self.note_fetches()
            self._ranks.note_hands()
            self._kinds[kind]()
            self.faults[kind] += 1
            self._fleet.wait_ready()
            self._load.doomed.clear()
        self._ranks.note_hands()

    def num_ranks_left(self) -> int:
        """Ranks that still run after the fleet has stopped."""
        return self._ranks.num_left()

    def _kill(self, role: str) -> None:
        victim = self._rng.choice(self._fleet.names(role))
        if role == "router":
            self._load.doomed.add(victim)
        self._fleet.signal(victim, signal.SIGKILL)
        self._fleet.wait_end(victim, 10)
        self._fleet.start(victim)

    def _stop(self, role: str) -> None:
        victim = self._rng.choice(self._fleet.names(role))
        self._fleet.signal(victim, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        self._fleet.signal(victim, signal.SIGCONT)

    def _stop_for_good(self) -> None:
        victim = self._rng.choice(self._fleet.names("prefill"))
        self._fleet.signal(victim, signal.SIGSTOP)
        time.sleep(STOPPED_FOR_GOOD_S)
        self._fleet.signal(victim, signal.SIGKILL)
        self._fleet.wait_end(victim, 10)
        self._fleet.start(victim)

    def _join(self) -> None:
        name = "prefill-9"
        self._fleet.start(name)
        self._fleet.wait_ready()
        self._fleet.signal(name, signal.SIGTERM)
        if self._fleet.wait_end(name, 60) != 0:
            raise RuntimeError(f"{name} did not leave in order")
        self._fleet.forget(name)

    def _take_id(self) -> None:
        """Start a second worker under a live worker's id: the second one must end, the first must
        not."""
        name = self._rng.choice(self._fleet.names("prefill") + self._fleet.names("decode"))
        if self._fleet.run_second(name, 60) == 0:
            raise RuntimeError(f"a second {name} ended as if all were well")

    def _drain(self) -> None:
        victim = self._rng.choice(self._fleet.names("prefill") + self._fleet.names("decode"))
        self._fleet.signal(victim, signal.SIGTERM)
        if self._fleet.wait_end(victim, 60) != 0:
            raise RuntimeError(f"{victim} did not drain in order")
        self._fleet.start(victim)

    def _cut(self, role: str, to: str) -> None:
        """Cut one connection from a process of a role, as soon as there is one."""
        deadline = time.monotonic() + CUT_WAIT_S
        while not self._try_cut(role, to):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {role} has a connection to a {to} that can be cut")
            time.sleep(0.05)

    def _try_cut(self, role: str, to: str) -> bool:
        pids = [self._fleet.pids[name] for name in self._names(role)]
        if to == "store":
            ports = listening_ports(self._fleet.valkey.pid)
        else:
            ports = set().union(*(listening_ports(self._fleet.pids[n]) for n in self._names(to)))
        found = [each for pid in pids for each in connections_of(pid, ports)]
        return bool(found) and cut(self._rng.choice(found))

    def _names(self, role: str) -> list[str]:
        if role == "worker":
            return self._fleet.names("prefill") + self._fleet.names("decode")
        return self._fleet.names(role)

    def _kill_store(self) -> None:
        os.kill(self._fleet.valkey.pid, signal.SIGKILL)
        time.sleep(self._rng.uniform(0.5, 3.0))
        self._fleet.valkey.restart()


async def run(arguments: argparse.Namespace, fleet: BenchFleet) -> tuple[Chaos, Tally, int]:
    """Run load and faults side by side; returns the faults, the tally and the leftover count."""
    rng = random.Random(arguments.seed)
    chaos: Chaos
    load = Load(arguments.model, lambda: chaos.routers(), arguments.seed)
    split = [role for role, layout in layouts_of(arguments).items() if layout.is_split]
    chaos = Chaos(fleet, load, rng, split)
    await load.learn(PROMPT_LENGTHS, NUM_TOKENS)
    until, most = time.monotonic() + 60 * arguments.minutes, math.inf
    if arguments.faults is not None:
        until, most = math.inf, arguments.faults
    injecting = asyncio.create_task(asyncio.to_thread(chaos.run, until, most))
    await load.run(arguments.clients, injecting.done)
    await injecting
    left = await asyncio.to_thread(fleet.left_over)
    chaos.note_fetches()
    return chaos, load.tally, left


def report(chaos: Chaos, tally: Tally, left: int, title: str) -> Table:
    """The figures as a table."""
    table = Table(title=title)
    table.add_column("what")
    table.add_column("count", justify="right")
    rows: list[tuple[str, Any]] = [
        ("requests", tally.requests),
        ("of them a talk's second turn", tally.turns),
        ("  finished / aborted by the client", f"{tally.finished} / {tally.aborted}"),
        ("faults", chaos.faults.total()),
        *((f"  {kind}", count) for kind, count in sorted(chaos.faults.items())),
        ("tokens", tally.tokens),
        ("mismatches", tally.mismatches),
        ("duplicates", tally.duplicates),
        ("losses", tally.losses),
        ("errors seen by clients", len(tally.errors)),
        ("503 with Retry-After, and asked again", tally.refused),
        ("streams cut with their router / resumed", f"{tally.cut} / {tally.resumed}"),
        ("longest pause of a stream, ms, p50 / p99", _percentiles(tally.pauses_ms)),
        ("tokens fetched by workers, as far as they reported", chaos.fetched_tokens),
        ("requests, blocks, handoffs, ranks left at the end", left),
    ]
    for what, count in rows:
        table.add_row(what, str(count))
    return table


def is_clean(tally: Tally, left: int) -> bool:
    """Whether there were no failures."""
    wrong = (tally.mismatches, tally.duplicates, tally.losses, len(tally.errors), left)
    return tally.finished > 0 and not any(wrong)


def main(argv: list[str]) -> int:
    """Run and print the table; 0 if there were no failures."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults", type=int, help="this many faults, however long they take")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--transports", default="shm,nixl")
    parser.add_argument("--placement", default="cache", choices=("cache", "load"))
    for role in ROLES:
        parser.add_argument(f"--{role}-ranks", type=Layout.parse, default=Layout(1, 1))
    arguments = parser.parse_args(argv)
    console = Console(soft_wrap=True)
    are_clean = [
        run_with(transport, arguments, console) for transport in arguments.transports.split(",")
    ]
    return 0 if all(are_clean) else 1


def run_with(transport: str, arguments: argparse.Namespace, console: Console) -> bool:
    """Run a fleet with one transport and print the table; whether there were no failures."""
    config = small_fleet(arguments.model, arguments.num_blocks)
    flags = (*config.worker_flags, f"--transport={transport}", "--peer-silence-s=3")
    router_flags = (*config.router_flags, f"--placement={arguments.placement}")
    layouts = layouts_of(arguments)
    if any(each.is_split for each in layouts.values()):
        flags += ("--kv-order=pairs", "--kv-windows=all")
    config = replace(
        config,
        worker_flags=flags,
        router_flags=router_flags,
        role_flags={role: layout.flags for role, layout in layouts.items()},
    )
    with BenchFleet(config) as fleet:
        chaos, tally, left = asyncio.run(run(arguments, fleet))
    left += chaos.num_ranks_left()
    title = f"chaos over {transport}, placement by {arguments.placement}, seed {arguments.seed}"
    console.print(report(chaos, tally, left, title))
    for error in tally.errors[:10]:
        console.print(f"error: {error}", markup=False)
    has_fetched = chaos.fetched_tokens > 0 or arguments.placement != "load"
    return is_clean(tally, left) and has_fetched


def layouts_of(arguments: argparse.Namespace) -> dict[str, Layout]:
    """How the models of each role's workers are split."""
    return {role: getattr(arguments, f"{role}_ranks") for role in ROLES}


def _percentiles(values: list[float]) -> str:
    if len(values) < 2:
        return "-"
    cuts = statistics.quantiles(values, n=100)
    return f"{cuts[49]:.0f} / {cuts[98]:.0f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
