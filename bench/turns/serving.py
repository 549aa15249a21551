"""The slowdown of a decode worker's streams while the worker serves fetches of its cached blocks.

    python -m bench.turns.serving [--model FOLDER] [--seconds 4] [--repeat 20] [--streams 4]

A prefill and a decode worker have a core each. Streams decode steadily on the decode worker, which
also holds long prompts; the prefill worker, whose pool is too small to keep them, gets these
prompts again and again. Through one router it fetches their blocks from the decode worker, through
the other it computes them. Phases of both kinds alternate, at the same rate of prompts, and each is
compared with its neighbour: ITL p99 of the streams with fetches over that without. Exits with 1 if
the median of these ratios is more than 1.05.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.paths import DEMO_MODEL
from bench.tools.raw_stream import completion
from bench.tools.stream_load import Endpoint, completion_body, stream_events
from checkpoint.model_source import resolve_model
from engine.checkpoint.config import load_model_config
from process.cores import usable_cores
from protocol.errors import BatonError

BLOCK = 16
PROMPT_TOKENS = 1024
NUM_PROMPTS = 8
POOL_PROMPTS = 5
"""The number of prompts that the prefill worker's pool holds; the worker grants a quarter of the
pool to one holder."""
STREAM_TOKENS = 256
MOST_SLOWDOWN = 1.05
FETCHING, COMPUTING = "router-1", "router-2"
HOST = "127.0.0.1"


@dataclass
class Phases:
    """Gaps between the tokens of streams, in ms, phase by phase, and the prompts answered."""

    gaps_ms: list[list[float]] = field(default_factory=list)
    num_prompts: int = 0

    def p99(self, phase: int) -> float:
        """The 99th percentile of one phase's gaps."""
        return statistics.quantiles(self.gaps_ms[phase], n=100)[98]


class Serving:
    """Streams that decode all the time, and phases in which prompts come."""

    def __init__(self, fleet: BenchFleet, model: str, vocab_size: int, streams: int) -> None:
        self._ports = {name: fleet.port(name) for name in (FETCHING, COMPUTING)}
        self._streaming = Endpoint.of(fleet.url(COMPUTING))
        self._model = model
        self._num_streams = streams
        rng = Random(1)
        self._prompts = cycle(
            [
                [rng.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)]
                for _ in range(NUM_PROMPTS)
            ]
        )
        self._vocab_size = vocab_size
        self._gaps: list[float] = []

    async def run(self, seconds: float, repeat: int, pause_s: float) -> dict[str, Phases]:
        """Alternate phases of both kinds. Raises BatonError if a request fails."""
        for _ in range(NUM_PROMPTS):  # the decode worker gets them
            await self._ask(COMPUTING, num_tokens=2)
        streams = [asyncio.create_task(self._stream(i)) for i in range(self._num_streams)]
        phases = asyncio.create_task(self._phases(seconds, repeat, pause_s))
        done, _ = await asyncio.wait((phases, *streams), return_when=asyncio.FIRST_COMPLETED)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        for ended in done:
            ended.result()  # raises the error, because no stream ends by itself
        return phases.result()

    async def _phases(self, seconds: float, repeat: int, pause_s: float) -> dict[str, Phases]:
        found = {name: Phases() for name in (FETCHING, COMPUTING)}
        for turn in range(repeat):
            order = (FETCHING, COMPUTING) if turn % 2 else (COMPUTING, FETCHING)
            for name in order:
                await self._ask(name)  # connects the pair, and lets the step model learn the load
                self._gaps = []
                until = time.perf_counter() + seconds
                while time.perf_counter() < until:
                    began = time.perf_counter()
                    await self._ask(name)
                    found[name].num_prompts += 1
                    await asyncio.sleep(max(0.0, began + pause_s - time.perf_counter()))
                found[name].gaps_ms.append(self._gaps)
        return found

    async def _ask(self, router: str, num_tokens: int = 1) -> None:
        body = completion_body(self._model, next(self._prompts), num_tokens)
        await completion(HOST, self._ports[router], body)

    async def _stream(self, number: int) -> None:
        """Run streams one after the other until cancelled."""
        rng = Random(number)
        while True:
            prompt = [rng.randrange(3, self._vocab_size) for _ in range(2 * BLOCK)]
            body, before = completion_body(self._model, prompt, STREAM_TOKENS), None
            async for at, event in stream_events(self._streaming, body):
                if before is not None and json.loads(event)["choices"]:
                    self._gaps.append(1e3 * (at - before))
                before = at


def fleet_config(folder: Path, cores: Sequence[int], transport: str, streams: int) -> FleetConfig:
    """Two routers, of which one lets workers fetch, and a worker of each role on a core each."""
    blocks = PROMPT_TOKENS // BLOCK + 1
    held = 4 * NUM_PROMPTS * blocks + streams * (STREAM_TOKENS + 4 * BLOCK)
    flags = ("--device=cpu", "--dtype=float32", "--torch-threads=1", f"--transport={transport}")
    return FleetConfig(
        str(folder),
        num_routers=2,
        worker_flags=flags,
        router_flags=("--local-prefill-threshold-tokens=0",),
        role_flags={
            "prefill": (f"--cores={cores[0]}", f"--num-blocks={POOL_PROMPTS * blocks}"),
            "decode": (f"--cores={cores[-1]}", f"--num-blocks={held}"),
            COMPUTING: ("--kv-fetch=off",),
        },
    )


def slowdowns(found: dict[str, Phases]) -> list[float]:
    """ITL p99 with fetches over that without, by phase: the quartiles."""
    with_fetches, without = found[FETCHING], found[COMPUTING]
    phases = range(len(without.gaps_ms))
    ratios = [with_fetches.p99(each) / without.p99(each) for each in phases]
    return statistics.quantiles(ratios, n=4)


def report(found: dict[str, Phases], fetched_tokens: int) -> Table:
    """The figures."""
    with_fetches, without = found[FETCHING], found[COMPUTING]
    low, middle, high = slowdowns(found)
    table = Table("", "with fetches", "without")
    for name, share in (("ITL p50, ms", 49), ("ITL p99, ms", 98)):
        cuts = [
            statistics.quantiles([gap for phase in each.gaps_ms for gap in phase], n=100)[share]
            for each in (with_fetches, without)
        ]
        table.add_row(name, *(f"{cut:.2f}" for cut in cuts))
    table.add_row("prompts", f"{with_fetches.num_prompts:,}", f"{without.num_prompts:,}")
    table.add_row("tokens fetched", f"{fetched_tokens:,}", "")
    table.add_row("p99 over p99 without, by phase", f"{middle:.3f} ({low:.3f} to {high:.3f})", "")
    return table


def main(argv: list[str]) -> int:
    """Run and print the table; 1 if a request failed, nothing was fetched, or streams were slowed
    down."""
    parser = argparse.ArgumentParser(prog="python -m bench.turns.serving", description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="folder or GGUF file")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a phase")
    parser.add_argument("--repeat", type=int, default=20, help="phases of each kind")
    parser.add_argument("--streams", type=int, default=4, help="that decode all the time")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds from prompt to prompt")
    parser.add_argument("--transport", default="shm", choices=("shm", "nixl"))
    arguments = parser.parse_args(argv)
    model, cores = Path(arguments.model).resolve(), usable_cores()
    vocab_size = load_model_config(resolve_model(model)).vocab_size
    config = fleet_config(model, cores, arguments.transport, arguments.streams)
    try:
        with BenchFleet(config) as fleet:
            serving = Serving(fleet, model.name, vocab_size, arguments.streams)
            found = asyncio.run(serving.run(arguments.seconds, arguments.repeat, arguments.pause))
            counters = fleet.workers(FETCHING)["prefill-1"]["counters"]
    except BatonError as error:
        print(f"bench.turns.serving: {error}", file=sys.stderr)
        return 1
    fetched = counters.get("fetched_tokens", 0)
    console = Console(soft_wrap=True)
    console.print(report(found, fetched))
    is_right = fetched > 0 and slowdowns(found)[1] <= MOST_SLOWDOWN
    console.print("ok" if is_right else "FAILED")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
