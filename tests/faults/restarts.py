"""Restarts either side of a transfer of KV blocks in its middle, again and again.

    python -m tests.faults.restarts [--restarts 200] [--transports nixl,shm] [--seed 1]

A fleet of two prefill and two decode workers serves one streamed request at a time. A worker is
held at the point where it writes blocks to another: of a handoff in one turn, of a fetch in the
next. There it is killed, or the worker that gets the blocks is, and restarted after the request.
Every request must end with the right tokens, no other process may end, and no block may be left in
use. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from protocol.messages import Role
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.integration.fleets import PAUSE, POLL_S, complete, wait_for, workers
from tests.integration.reference import BLOCK, NUM_TOKENS, Reference, load_references

POINT = "landing"
MAX_PASSES = 3
TRIES = 20
LEAST_BLOCKS = 20
SIDES = ("source", "sink")
KINDS = ("handoff", "fetch")
BY_LOAD = {"BATON_PLACEMENT": "load"}
"""So that a prompt comes to a worker that lacks it, and is fetched."""


@dataclass
class Tally:
    """What happened: restarts by kind of transfer and side, and what was wrong."""

    restarts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Restarts:
    """Kills workers of a fleet in the middle of transfers, one at a time."""

    def __init__(self, fleet: FaultyFleet, rng: Random) -> None:
        self.tally = Tally()
        self._fleet = fleet
        self._rng = rng
        self._prompts = [e for e in load_references() if len(e.prompt) >= LEAST_BLOCKS * BLOCK]

    def run(self, number: int) -> Tally:
        """Restart so many workers: each side of each kind of transfer in turn."""
        for turn in range(number):
            self._restart(KINDS[turn // 2 % 2], SIDES[turn % 2], turn)
        return self.tally

    def _restart(self, kind: str, side: str, turn: int) -> None:
        fleet, pids = self._fleet, self._fleet.pids
        reference = self._rng.choice(self._prompts)
        stream, source = self._held_transfer(kind, reference, turn)
        victim = source if side == "source" else self._sink_of(source)
        fleet.kill(victim)
        if victim != source:
            fleet.release(source, POINT)
        stream.wait()
        what = f"{turn}: {side} {victim} of a {kind}"
        if (stream.error, stream.tokens) != (None, list(reference.output)):
            self.tally.wrong.append(f"{what}: {stream.error}, {stream.tokens}")
        fleet.revive()
        changed = {name for name, pid in fleet.pids.items() if pid != pids[name]}
        if changed != {victim}:
            self.tally.wrong.append(f"{what}: {sorted(changed)} were restarted")
        wait_for("every block to come back", lambda: not self._blocks_used())
        self.tally.restarts[f"{kind}, {side}"] += 1

    def _held_transfer(self, kind: str, reference: Reference, turn: int) -> tuple[Stream, str]:
        """A stream whose blocks are on their way, and the worker that writes them and is held."""
        prompt = list(reference.prompt)
        names = [*self._fleet.names(Role.PREFILL), *self._fleet.names(Role.DECODE)]
        for attempt in range(TRIES):
            salt = f"{turn}-{attempt}"
            if kind == "fetch":
                complete(self._fleet.fleet, prompt, max_tokens=1, cache_salt=salt)
            self._fleet.arm(names, POINT, self._rng.randint(1, MAX_PASSES))
            stream = Stream(self._fleet.url, prompt, NUM_TOKENS, cache_salt=salt)
            while not stream.is_over:
                if self._fleet.is_any_held(POINT):
                    return stream, self._fleet.held(POINT)
                PAUSE.wait(POLL_S)
            stream.wait()
            self._fleet.release_all()
        raise AssertionError(f"no {kind} began in {TRIES} tries")

    def _sink_of(self, source: str) -> str:
        """The worker that has granted blocks to the held one."""

        def granting() -> str | None:
            shown = workers(self._fleet.fleet)
            names = [each for each in shown if shown[each]["num_handoffs"] and each != source]
            return names[0] if names else None

        return wait_for("the sink to report its grant", granting)

    def _blocks_used(self) -> int:
        return sum(each["blocks_used"] for each in workers(self._fleet.fleet).values())


def run(transport: str, number: int, seed: int) -> Tally:
    """Restart so many workers of a fleet with this transport."""
    with faulty_fleet(BY_LOAD, prefill=2, decode=2, transport=transport) as fleet:
        return Restarts(fleet, Random(seed)).run(number)


def main(argv: list[str]) -> int:
    """Run with each transport and print what happened; 0 if all was well."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.restarts", description=__doc__)
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--transports", default="nixl,shm")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    is_right = True
    for transport in arguments.transports.split(","):
        began = time.monotonic()
        tally = run(transport, arguments.restarts, arguments.seed)
        is_right = is_right and not tally.wrong
        print(f"{transport}: {tally.restarts.total()} restarts in mid-transfer", end=" ")
        print(f"in {time.monotonic() - began:.0f} s: {dict(tally.restarts)}")
        for line in tally.wrong:
            print(f"wrong: {line}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
