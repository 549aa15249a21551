"""The worst that one client may send, and what it does to another client's stream.

    python -m tests.hostile [--workers mock|real] [--only PATTERN] [--at-once 4]

For every endpoint and every field of its body, the largest and the worst input that the limits
allow, wrong values for every field (from the OpenAPI document), and attacks below the body. Each
attack runs `--at-once` times at once beside a bystander whose stream gets a token every few
milliseconds. Mock workers have a long context and compute nothing; real ones run the demo model. A
mock worker reports the pauses between its own steps, since hundreds of requests with large fields
keep it busy, too: "worker" is its longest pause, and "rest" the longest stall of the bystander's
stream without the worker's pauses, which leaves the router and the link to the worker. Exits with 1
if the rest or a wait for `/live` ever took 250 ms, if the router ever had 1.5 GB, or if an answer
was neither 2xx, 4xx nor 503 with `Retry-After`. Prints one line for each attack that did harm, at
once and at the end, and the ten worst attacks. If something else runs on the machine at the start,
the times without a core are subtracted, and the verdict is a provisional one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.router.late_steps import Span, rest_s
from bench.router.mock_fleet import RouterFleet, RouterFleetConfig
from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.paths import DEMO_MODEL
from protocol.errors import BatonError
from protocol.messages import Role
from tests.hostile.bystander import Bystander, MemoryWatch
from tests.hostile.client import HostileClient
from tests.hostile.conversations import BODY_ATTACKS
from tests.hostile.core_waits import is_busy
from tests.hostile.members.attacks import MEMBER_ATTACKS, Insider
from tests.hostile.sizes import FULL, BodyAttack, Sizes
from tests.hostile.wire import WIRE_ATTACKS
from tests.hostile.wrong import wrong_attacks

MAX_STALL_S = 0.25
MAX_MEMORY = 1_500_000_000
WORST = 10
WAITS = ("stall", "worker", "rest", "/live", "no core", "machine")
STEP_MS = 10.0
BURST = 64
_SETTLE_S = 0.05
_OUTPUT = "Any object can be tested for truth value, for use in an if or while condition. "


@dataclass(frozen=True)
class Attack:
    """A named attack; `run` sends it once."""

    name: str
    run: Callable[[HostileClient], Awaitable[None]]
    times: int


@dataclass
class Outcome:
    """What one attack did. Seconds and bytes. `gap_s` is the bystander's longest stall, `worker_s`
    the longest pause between two steps of a mock worker, and `rest_s` the longest stall without
    such pauses; real workers report none. `rest_s` and `probe_s` leave out times without a core if
    the machine is busy."""

    name: str
    gap_s: float
    worker_s: float
    rest_s: float
    probe_s: float
    core_wait_s: float
    machine_s: float
    memory: int
    seconds: float
    statuses: dict[int, int]
    answered: int
    faults: list[str] = field(default_factory=list)

    @property
    def router_s(self) -> float:
        """The longest wait that the worker's pauses do not explain."""
        return max(self.rest_s, self.probe_s)

    @property
    def is_harmless(self) -> bool:
        """Whether the attack kept within all bounds."""
        return not self.harm

    @property
    def harm(self) -> str:
        """The bounds that the attack broke, in one line; empty if none."""
        harms = []
        for what, seconds in (("the stream stalled", self.rest_s), ("/live waited", self.probe_s)):
            if seconds >= MAX_STALL_S:
                harms.append(f"{what} {1e3 * seconds:.0f} ms, bound {1e3 * MAX_STALL_S:.0f}")
        if self.memory >= MAX_MEMORY:
            harms.append(f"the router had {self.memory >> 20} MiB, bound {MAX_MEMORY >> 20}")
        counts = Counter(" ".join(each.split()) for each in self.faults)
        harms += [f"{count} x {fault[:120]}" for fault, count in counts.items()]
        return "; ".join(harms)


def all_attacks(at_once: int) -> list[Attack]:
    """Every attack. Wrong values are sent one at a time, since there are many."""

    def of_body(attack: BodyAttack, times: int) -> Attack:
        name = f"{attack.path} {attack.name}"
        return Attack(name, lambda client: client.attack(attack), times)

    return [
        *(of_body(each, at_once) for each in BODY_ATTACKS),
        *(Attack(each.name, each.run, 1) for each in WIRE_ATTACKS),
        *(of_body(each, 1) for each in wrong_attacks()),
    ]


def member_attacks(insider: Insider) -> list[Attack]:
    """Attacks of processes beside the clients."""

    def of(run: Callable[[Insider], None]) -> Callable[[HostileClient], Awaitable[None]]:
        return lambda client: asyncio.to_thread(run, insider)

    return [Attack(name, of(run), 1) for name, run in MEMBER_ATTACKS.items()]


def run_attacks(
    fleet: BenchFleet, attacks: Sequence[Attack], sizes: Sizes, console: Console, busy: bool
) -> list[Outcome]:
    """Run one attack after the other; prints those that do harm at once. On a `busy` machine, times
    without a core do not count."""
    host, port = "127.0.0.1", fleet.port("router-1")
    outcomes = []

    def late_steps() -> list[Span]:
        return fleet.late_steps("decode-1") if isinstance(fleet, RouterFleet) else []

    bystander = Bystander(host, port, sizes.model, fleet.pids["router-1"])
    try:
        with MemoryWatch(fleet.pids["router-1"]) as memory:
            for attack in attacks:
                client = HostileClient(host, port, sizes)
                outcomes.append(_run_one(attack, bystander, memory, late_steps, client, busy))
                if not outcomes[-1].is_harmless:
                    console.print(_line(outcomes[-1]), markup=False)
    finally:
        bystander.close()
    return outcomes


def _run_one(
    attack: Attack,
    bystander: Bystander,
    memory: MemoryWatch,
    late_steps: Callable[[], list[Span]],
    client: HostileClient,
    busy: bool,
) -> Outcome:
    async def attacks() -> None:
        await asyncio.gather(*(attack.run(client) for _ in range(attack.times)))

    time.sleep(_SETTLE_S)
    bystander.look()
    memory.take_peak()
    started = time.monotonic()
    asyncio.run(attacks())
    seconds = time.monotonic() - started
    time.sleep(_SETTLE_S)
    seen, answers, late = bystander.look(), client.answers, late_steps()
    return Outcome(
        attack.name,
        max(each.span.seconds for each in seen.gaps),
        max((each.seconds for each in late if each.end > started), default=0.0),
        max(rest_s(each.span, late) - busy * each.core_wait_s for each in seen.gaps),
        seen.probe_on_core_s if busy else seen.probe_s,
        seen.core_wait_s,
        seen.machine_s,
        memory.take_peak(),
        seconds,
        answers.statuses,
        answers.num_bytes,
        answers.faults,
    )


def _line(outcome: Outcome) -> str:
    return f"HARM {outcome.name}: {outcome.harm}"


def _waits_ms(outcome: Outcome) -> list[str]:
    """The waits of an outcome in milliseconds, in the order of `WAITS`."""
    waits = (
        outcome.gap_s,
        outcome.worker_s,
        outcome.rest_s,
        outcome.probe_s,
        outcome.core_wait_s,
        outcome.machine_s,
    )
    return [f"{1e3 * each:.0f}" for each in waits]


def report(outcomes: Sequence[Outcome]) -> Table:
    """The worst attacks by the router's share, then the one that took the most memory."""
    table = Table(title=f"the worst of {len(outcomes)} attacks")
    waits = [f"{name} ms" for name in WAITS]
    for column in ("attack", *waits, "router MiB", "s", "answers", "MB"):
        table.add_column(column, justify="left" if column == "attack" else "right")
    worst = sorted(outcomes, key=lambda each: -each.router_s)[:WORST]
    largest = max(outcomes, key=lambda each: each.memory)
    for each in worst if largest in worst else [*worst, largest]:
        statuses = ", ".join(f"{count} x {status}" for status, count in each.statuses.items())
        table.add_row(
            each.name,
            *_waits_ms(each),
            f"{each.memory >> 20:,}",
            f"{each.seconds:.1f}",
            statuses,
            f"{each.answered / 1e6:,.1f}",
        )
    return table


def _fleet(workers: str, sizes: Sizes, model: Path) -> BenchFleet:
    if workers == "real":
        flags = ("--device=cpu", "--torch-threads=1")
        return BenchFleet(FleetConfig(str(model), 1, 1, 1, worker_flags=flags))
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(_OUTPUT).ids
    roles = (Role.PREFILL, Role.DECODE)
    return RouterFleet(
        RouterFleetConfig(model, roles, ids, sizes.context, step_ms=STEP_MS, burst=BURST)
    )


def main(argv: Sequence[str]) -> int:
    """Run and print the worst; 0 if all attacks were harmless."""
    cli = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    cli.add_argument("--workers", choices=("mock", "real"), default="mock")
    cli.add_argument("--only", default="", help="attacks whose name matches this")
    cli.add_argument("--at-once", type=int, default=4, help="copies of each attack at once")
    arguments = cli.parse_args(argv)
    began = time.monotonic()
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    load, busy = os.getloadavg()[0], is_busy()
    try:
        with _fleet(arguments.workers, FULL, DEMO_MODEL) as fleet:
            insider = Insider(fleet.secret, fleet.valkey.url)
            every = [*all_attacks(arguments.at_once), *member_attacks(insider)]
            attacks = [each for each in every if re.search(arguments.only, each.name)]
            outcomes = run_attacks(fleet, attacks, FULL, console, busy)
            left = fleet.left_over()
    except BatonError as error:
        print(f"tests.hostile: {error}", file=sys.stderr)
        return 2
    console.print(report(outcomes))
    harmful = [each for each in outcomes if not each.is_harmless]
    for each in harmful:
        console.print(_line(each), markup=False)
    longest = max(each.router_s for each in outcomes)
    console.print(
        f"{arguments.workers} workers, {os.cpu_count()} cores, load before {load:.1f}: "
        f"{len(harmful)} of {len(outcomes)} attacks did harm, the longest wait of a bystander was "
        f"{1e3 * longest:.0f} ms, {(time.monotonic() - began) / 60:.1f} minutes"
    )
    if busy:
        console.print("the machine was busy: times without a core were subtracted; run it idle")
    if left:
        console.print(
            f"HARM after all attacks: {left} requests are left on workers (-1: no answer)"
        )
    return 1 if harmful or left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
