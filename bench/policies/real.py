"""Baton's placement beside another one, on real workers in turns.

    python -m bench.policies.real agents --trace FILE [--shrink 64] [--sessions 16] [--pairs 8]
    python -m bench.policies.real hot-prefix|interference [--other=--kv-fetch=off]

One prefill and two decode workers serve two routers: one places by predicted cost, as routers do by
default; the other has the flags of `--other`, by default a threshold of 64 uncached tokens up to
which a decode worker computes a prompt. Both get the same load in turns, under cache salts that let
no turn find another one's blocks. Loads are recorded sessions of agents, shrunk to the model's
context (`bench.replay`), requests that share a prefix (`bench.hot_prefix`), and long prompts among
streams (`bench.interference`). Prints for each figure the median of the ratios of neighbouring
turns with its 95 % interval. Ends with status 1 if p99 of TTFT or ITL is worse by more than chance.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.hot_prefix import Load as HotPrefix
from bench.interference import quantile
from bench.policies.real_loads import AgentOptions, Load, Sample, agents, hot_prefix, interference
from bench.replay.smaller_traces import shrunk
from bench.router.recording import median_interval
from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.machine import processor_name
from bench.tools.paths import DEMO_MODEL
from bench.tools.records import add_record_option, keep_table
from bench.tools.stream_load import StreamLoad
from checkpoint.model_source import resolve_model
from engine.checkpoint.config import load_model_config
from protocol.errors import BatonError, ConfigError
from simulator.traces.files import TraceOptions, read_trace

NUM_DECODE = 2
OURS, OTHER = "router-1", "router-2"
_THRESHOLD = "--local-prefill-threshold-tokens=64"
_BLOCK_TOKENS = 16
_SETTLE_S = 0.5
_COUNT = re.compile(
    r"^baton_(?:router_attempts|prompt_tokens_by_source)_total"
    r'\{(?:mode|source)="(\w+)"\} (\S+)$',
    re.M,
)


@dataclass(frozen=True)
class Turn:
    """One turn of a router: latencies, the share of requests that a pair served, and the prompt
    tokens that were computed."""

    sample: Sample
    split_share: float
    computed_tokens: float

    def figures(self) -> dict[str, float]:
        """What is compared; latencies in milliseconds."""
        ttft_ms, gaps_ms = ([1e3 * each for each in sorted(times)] for times in self.sample)
        return {
            "TTFT mean, ms": statistics.mean(ttft_ms),
            "TTFT p50, ms": quantile(ttft_ms, 0.5),
            "TTFT p99, ms": quantile(ttft_ms, 0.99),
            "ITL mean, ms": statistics.mean(gaps_ms),
            "ITL p99, ms": quantile(gaps_ms, 0.99),
            "computed tokens": self.computed_tokens,
        }


JUDGED = ("TTFT p99, ms", "ITL p99, ms")


def take_turns(
    turn: Callable[[str, int], Turn], num_pairs: int, has_time: Callable[[], bool]
) -> list[tuple[Turn, Turn]]:
    """The turns of both routers, pair by pair, while there is time. The first pair only warms up;
    the router that begins alternates. `turn` runs one turn of a router with the load of a pair.
    """
    pairs = []
    for number in range(num_pairs + 1):
        if number > 1 and not has_time():
            break
        order = (OTHER, OURS) if number % 2 else (OURS, OTHER)
        found = {router: turn(router, number) for router in order}
        pairs.append((found[OURS], found[OTHER]))
    return pairs[1:]


def _turn(fleet: BenchFleet, load: Load, router: str, pair: int) -> Turn:
    url = fleet.url(router)
    before = _counts(url)
    sample = load(url, pair, f"{router} {pair}")
    time.sleep(_SETTLE_S)  # the workers' last traces come after the streams
    counts = {name: value - before[name] for name, value in _counts(url).items()}
    placed = counts["local"] + counts["remote"]
    return Turn(sample, counts["remote"] / max(1.0, placed), counts["computed"])


def _counts(url: str) -> dict[str, float]:
    """The router's attempts by mode, and its prompt tokens by source."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return {name: float(value) for name, value in _COUNT.findall(answer.read().decode())}


def report(title: str, other: str, pairs: Sequence[tuple[Turn, Turn]]) -> Table:
    """One row for each figure: medians over the turns, and the ratio."""
    table = Table("", "by cost", other, "ratio, 95 % interval", title=title)
    both = [(ours.figures(), others.figures()) for ours, others in pairs]
    for name in both[0][0]:
        low, middle, high = ratio(pairs, name)
        medians = [statistics.median(each[side][name] for each in both) for side in (0, 1)]
        cells = [f"{each:,.0f}" if each >= 1000 else f"{each:,.2f}" for each in medians]
        table.add_row(name, *cells, f"{middle:.3f} ({low:.3f} to {high:.3f})")
    shares = [statistics.mean(each[side].split_share for each in pairs) for side in (0, 1)]
    table.add_row("requests that a pair served", *(f"{each:.0%}" for each in shares), "")
    num = sum(len(ours.sample.ttft_s) for ours, _ in pairs)
    table.caption = f"{len(pairs)} pairs of turns, {num:,} requests in all turns of each router"
    return table


def ratio(pairs: Sequence[tuple[Turn, Turn]], name: str) -> tuple[float, float, float]:
    """A figure by cost over the same with the other placement, pair by pair: the lower end of the
    95 % interval, the median, the upper end."""
    return median_interval([ours.figures()[name] / other.figures()[name] for ours, other in pairs])


def is_worse(pairs: Sequence[tuple[Turn, Turn]]) -> bool:
    """Whether a judged figure is worse by cost, by more than chance."""
    return any(ratio(pairs, name)[0] > 1 for name in JUDGED)


def main(argv: Sequence[str]) -> int:
    """Run and print the table. Returns the exit status."""
    args = _arguments(argv)
    try:
        load = _load(args)
        with _fleet(args) as fleet:
            until = time.monotonic() + args.seconds
            run = partial(_turn, fleet, load)
            pairs = take_turns(run, args.pairs, lambda: time.monotonic() < until)
    except BatonError as error:
        print(f"bench.policies.real: {error}", file=sys.stderr)
        return 2
    table = report(f"{args.load}, {processor_name()}", args.other, pairs)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    keep_table(args.record, f"placement in turns, {args.load}", table)
    return 1 if is_worse(pairs) else 0


@contextmanager
def _fleet(args: argparse.Namespace) -> Iterator[BenchFleet]:
    flags = ("--device=cpu", "--torch-threads=1", f"--num-blocks={args.num_blocks}")
    config = FleetConfig(
        str(args.model),
        num_routers=2,
        num_decode=NUM_DECODE,
        worker_flags=(*flags, f"--block-size={_BLOCK_TOKENS}"),
        role_flags={OTHER: tuple(args.other.split())},
    )
    with BenchFleet(config) as fleet:
        yield fleet


def _load(args: argparse.Namespace) -> Load:
    model = args.model
    config = load_model_config(resolve_model(model))
    if args.load == "hot-prefix":
        return hot_prefix(HotPrefix(model.name, config.vocab_size, args.requests, args.span_s, 120))
    if args.load == "interference":
        streams = StreamLoad(
            model=model.name,
            vocab_size=config.vocab_size,
            num_streams=8,
            stream_tokens=256,
            long_prompt=1024,
            arrivals_per_s=args.arrivals,
        )
        return interference(streams, args.span_s)
    if args.trace is None:
        raise ConfigError("the load of agents needs --trace FILE")
    options = AgentOptions(
        args.sessions, config.max_position_embeddings, args.most_turns, args.span_s, args.pace
    )
    return agents(shrunk(read_trace(args.trace, TraceOptions()), args.shrink), options)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.policies.real", description=__doc__)
    parser.add_argument("load", choices=("agents", "hot-prefix", "interference"))
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="folder or GGUF file")
    parser.add_argument("--other", default=_THRESHOLD, help="flags of the other router")
    parser.add_argument("--pairs", type=int, default=8, help="turns of each router")
    parser.add_argument("--seconds", type=float, default=inf, help="then no pair of turns begins")
    parser.add_argument("--num-blocks", type=int, default=8192, help="KV blocks of each worker")
    parser.add_argument("--span-s", type=float, default=10.0, help="when requests begin in a turn")
    parser.add_argument("--requests", type=int, default=150, help="that share a prefix")
    parser.add_argument("--arrivals", type=float, default=6.0, help="long prompts per second")
    parser.add_argument("--trace", help="sessions of agents, as for `baton simulate`")
    parser.add_argument("--shrink", type=int, default=64, help="divides their numbers of tokens")
    parser.add_argument("--pace", type=float, default=64.0, help="divides their pauses")
    parser.add_argument("--sessions", type=int, default=16, help="in a turn")
    parser.add_argument("--most-turns", type=int, default=30, help="of a session")
    add_record_option(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
