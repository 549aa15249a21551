"""A hot prefix: many requests that share one prefix and have long answers, on a split fleet.

    python -m bench.hot_prefix [--requests 150] [--thresholds 0,16,64,256] [--model FOLDER]

Runs a prefill and three decode workers behind a router, one fleet after the other: one that places
by predicted cost, as routers do by default; others with a `local_prefill_threshold_tokens`; and one
with a single decode worker, where every request goes to the worker that holds the prefix, so its
number of computed tokens is that of routing by cache alone. Exits with 1 if placement by cost is
not within 1.3x of the best time to first token, at the median and at p99, or computes more than
1.1x the tokens of routing by cache.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.paths import DEMO_MODEL
from bench.tools.stream_load import Endpoint, completion_body, stream_events
from engine.checkpoint.config import load_model_config
from protocol.errors import BatonError

PREFIX_TOKENS, OWN_TOKENS = 400, 24
NUM_DECODE = 3
MAX_BATCH = 64
TTFT_BOUND, TOKENS_BOUND = 1.3, 1.1
_COMPUTED = re.compile(r'^baton_prompt_tokens_by_source_total\{source="computed"\} (\S+)$', re.M)
_SETTLE_S = 0.5


@dataclass(frozen=True)
class Load:
    """The requests: how many, over how many seconds they arrive, and the length of an answer.
    Prompts share no cached blocks with those of another `cache_salt`."""

    model: str
    vocab_size: int
    num_requests: int
    seconds: float
    answer_tokens: int
    cache_salt: str | None = None

    def prompts(self) -> list[list[int]]:
        """Prompts that share their first `PREFIX_TOKENS` tokens; the same ones each time."""
        rng = random.Random(41)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(3, self.vocab_size) for _ in range(count)]

        prefix = tokens(PREFIX_TOKENS)
        return [prefix + tokens(OWN_TOKENS) for _ in range(self.num_requests + 1)]


@dataclass(frozen=True)
class Result:
    """One fleet's figures; `workers` counts the requests of each decode worker."""

    label: str
    ttft_ms: list[float]
    computed_tokens: int
    workers: Counter[str]

    @property
    def p50(self) -> float:
        """Median of the time to the first token, in ms."""
        return statistics.median(self.ttft_ms)

    @property
    def p99(self) -> float:
        """The 99th percentile of the time to the first token, in ms."""
        return sorted(self.ttft_ms)[int(0.99 * (len(self.ttft_ms) - 1))]


def run_fleet(
    label: str, load: Load, folder: str, num_decode: int, threshold: int | None
) -> Result:
    """One fleet from its start to its end. Raises BatonError."""
    fixed = () if threshold is None else (f"--local-prefill-threshold-tokens={threshold}",)
    blocks = (load.num_requests * (OWN_TOKENS + load.answer_tokens) + PREFIX_TOKENS) // 16
    config = FleetConfig(
        folder,
        num_decode=num_decode,
        worker_flags=(
            "--device=cpu", "--torch-threads=1", f"--max-batch-size={MAX_BATCH}",
            f"--num-blocks={blocks + 2 * load.num_requests}",
        ),
        router_flags=(*fixed, "--trace-history=4000"),
    )  # fmt: skip
    with BenchFleet(config) as fleet:
        url = fleet.url("router-1")
        warm, *prompts = load.prompts()
        asyncio.run(send(url, load, [warm], 0.0))
        before = _computed(url)
        times = asyncio.run(send(url, load, prompts, load.seconds))
        time.sleep(_SETTLE_S)  # the workers' last traces come after the streams
        ttft_ms = [1e3 * (first_at - sent_at) for sent_at, first_at, *_ in times]
        return Result(label, ttft_ms, _computed(url) - before, _workers(url))


async def send(
    url: str, load: Load, prompts: Sequence[list[int]], seconds: float
) -> list[list[float]]:
    """Send the prompts at random times within `seconds`. Returns for each prompt when it was sent
    and when its tokens came, in seconds."""
    rng, endpoint = random.Random(7), Endpoint.of(url)

    async def one(prompt: list[int], at: float) -> list[float]:
        await asyncio.sleep(at)
        body = completion_body(load.model, prompt, load.answer_tokens, load.cache_salt)
        sent_at = time.perf_counter()
        return [sent_at, *[now async for now, _ in stream_events(endpoint, body)]]

    return list(await asyncio.gather(*(one(each, rng.uniform(0, seconds)) for each in prompts)))


def _computed(url: str) -> int:
    """Prompt tokens that workers have computed so far, by the router's metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        found = _COMPUTED.search(answer.read().decode())
    return 0 if found is None else round(float(found[1]))


def _workers(url: str) -> Counter[str]:
    with urllib.request.urlopen(f"{url}/requests?limit=200", timeout=10) as answer:
        rows = msgspec.json.decode(answer.read())["rows"]
    return Counter(row["decode"] for row in rows)


def report(results: Iterable[Result]) -> Table:
    """One row for each fleet."""
    table = Table(title=f"{PREFIX_TOKENS} shared tokens, 1 prefill and {NUM_DECODE} decode workers")
    for name in ("local threshold", "TTFT p50, ms", "p99, ms", "computed tokens"):
        table.add_column(name, justify="right")
    table.add_column("requests by decode worker")
    for each in results:
        spread = ", ".join(f"{name} {count}" for name, count in sorted(each.workers.items()))
        figures = (f"{each.p50:,.1f}", f"{each.p99:,.1f}", f"{each.computed_tokens:,}")
        table.add_row(each.label, *figures, spread)
    return table


def verdict(ours: Result, results: list[Result], by_cache: Result) -> list[str]:
    """The figures that exceed their bounds, in words."""
    wrong = []
    for name in ("p50", "p99"):
        value, best = getattr(ours, name), min(getattr(each, name) for each in results)
        if value > TTFT_BOUND * best:
            wrong.append(f"TTFT {name} is {value / best:.2f}x the best, bound {TTFT_BOUND}x")
    ratio = ours.computed_tokens / max(1, by_cache.computed_tokens)
    if ratio > TOKENS_BOUND:
        wrong.append(f"{ratio:.2f}x the computed tokens of routing by cache, bound {TOKENS_BOUND}x")
    return wrong


def main(argv: list[str]) -> int:
    """Run and print the table; 1 if placement by cost exceeds a bound."""
    arguments = _parser().parse_args(argv)
    folder = Path(arguments.model)
    vocab_size = load_model_config(folder).vocab_size
    load = Load(
        folder.name, vocab_size, arguments.requests, arguments.seconds, arguments.answer_tokens
    )
    thresholds = sorted({*map(int, filter(None, arguments.thresholds.split(",")))})
    try:
        by_cache = run_fleet("one decode worker", load, str(folder), 1, None)
        ours = run_fleet("none: by cost", load, str(folder), NUM_DECODE, None)
        others = [run_fleet(str(each), load, str(folder), NUM_DECODE, each) for each in thresholds]
    except BatonError as error:
        print(f"bench.hot_prefix: {error}", file=sys.stderr)
        return 1
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    console.print(report([by_cache, ours, *others]))
    wrong = verdict(ours, [ours, *others], by_cache)
    console.print("\n".join(wrong) if wrong else "placement by cost is within its bounds")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.hot_prefix", description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="folder of a checkpoint")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=2.0, help="time in which they arrive")
    parser.add_argument("--answer-tokens", type=int, default=120)
    parser.add_argument("--thresholds", default="0,16,64,256", help="beside placement by cost")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
