"""The router's cost: CPU seconds of its process per request and per token, added latency.

    python -m bench.router [--apart] [--peer dynamo --peer-python PYTHON] [--repeat 3]
    python -m bench.router --soak
    python -m bench.router --decision
    python -m bench.router --recording
    python -m bench.router --calls

Runs mock workers that speak the fleet's protocol and compute nothing, a real `baton router`, and a
client that only counts. Contestants take turns, and figures are medians of the repeats, so that
drift of the machine's speed affects all alike: quote ratios. `--soak` sends 10,000 requests through
two routers, 1,000 streams at a time; it exits with 1 if a request failed or memory grew.
`--decision` measures only what one decision costs among 100 workers; the other figures come with it
otherwise. `--recording` measures what traces and metrics cost, in minutes.
"""

from __future__ import annotations

import argparse
import os
import platform
import pydoc_data.topics
import random
import statistics
import sys
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.router.calls import CountedFleet
from bench.router.decision import decision_costs
from bench.router.dynamo_peer import HOW_TO_GET, DynamoPeer
from bench.router.mock_fleet import RouterFleet, RouterFleetConfig, Usage
from bench.router.recording import Load, SwitchedFleet, recording_cost
from bench.tools.http_load import LoadResult, post, run_load
from bench.tools.paths import DEMO_MODEL
from bench.tools.records import add_record_option, keep_table
from protocol.messages import Role

PATH = "/v1/chat/completions"
MAX_CONTEXT = 32_768
SHORT_WORDS = 8
LONG_WORDS = 1000
LONG_PROMPTS = 300
STREAM_TOKENS = 100
LATENCY_REQUESTS = 300
SOAK_REQUESTS = 10_000
SOAK_STREAMS = 1000
SOAK_TOKENS = 20
SOAK_WARM_UPS = 3
SOAK_GROWTH = 1.05
_WARM_UP = 200
_WORDS = " ".join(pydoc_data.topics.topics.values()).split()
_rng = random.Random(1)
_OUTPUT_TEXT = " Any object can be tested for truth value, for use in an if or while condition."
"""Repeated, it has the tokens that the tokenizer chooses, as most answers of models have."""


class Contestant(Protocol):
    """A running front end that reports its process's usage so far."""

    name: str

    @property
    def targets(self) -> list[tuple[str, int]]: ...
    @property
    def model_name(self) -> str: ...
    def usage(self) -> Usage: ...


@dataclass(frozen=True)
class Figures:
    """One round's figures of one contestant. Milliseconds are measured at the client."""

    requests_per_s: float
    cpu_s_per_1k_short: float
    cpu_s_per_1k_long: float
    cpu_s_per_1m_tokens: float
    tokens_per_s: float
    latency_p50_ms: float
    latency_p99_ms: float
    added_p50_ms: float | None
    added_p99_ms: float | None


def measure(contestant: Contestant) -> Figures:
    """One round. Raises RuntimeError if a request failed."""
    target = contestant.targets[0]
    short = [_request(contestant, each, max_tokens=1) for each in _prompts(SHORT_WORDS, 500)]
    _run(target, short, 32, _WARM_UP)
    requests, short_cpu = _costed(contestant, short, 32, 2000)
    prompts = _prompts(LONG_WORDS, LONG_PROMPTS)
    long = [_request(contestant, each, max_tokens=1) for each in prompts]
    lengthy, long_cpu = _costed(contestant, long, 8, LONG_PROMPTS)
    streaming = [
        _request(contestant, each, max_tokens=STREAM_TOKENS, stream=True)
        for each in _prompts(SHORT_WORDS, 100)
    ]
    streams, stream_cpu = _costed(contestant, streaming, 64, 320)
    if streams.events < 0.9 * STREAM_TOKENS * streams.requests:
        raise RuntimeError(f"{contestant.name}: {streams.events} events: tokens were put together")
    num_tokens = STREAM_TOKENS * streams.requests
    alone = _run(target, short, 1, LATENCY_REQUESTS, keeps_ids=True)
    own_ms = _own_ms(target, alone.ids) if contestant.name.startswith("baton") else []
    latencies_ms = [1e3 * each for each in alone.latencies_s]
    added_ms = [total - own for total, own in zip(latencies_ms, own_ms, strict=False)]
    return Figures(
        requests_per_s=requests.requests_per_s,
        cpu_s_per_1k_short=1e3 * short_cpu / requests.requests,
        cpu_s_per_1k_long=1e3 * long_cpu / lengthy.requests,
        cpu_s_per_1m_tokens=1e6 * stream_cpu / num_tokens,
        tokens_per_s=num_tokens / streams.seconds,
        latency_p50_ms=statistics.median(latencies_ms),
        latency_p99_ms=_p99(latencies_ms),
        added_p50_ms=statistics.median(added_ms) if added_ms else None,
        added_p99_ms=_p99(added_ms) if added_ms else None,
    )


def _costed(
    contestant: Contestant, requests: list[bytes], concurrency: int, count: int
) -> tuple[LoadResult, float]:
    """Run a load; returns its result and the CPU seconds that the front end used for it."""
    before = contestant.usage()
    result = _run(contestant.targets[0], requests, concurrency, count)
    return result, contestant.usage().cpu_s - before.cpu_s


def _run(
    target: tuple[str, int],
    requests: list[bytes],
    concurrency: int,
    count: int,
    keeps_ids: bool = False,
) -> LoadResult:
    result = uvloop.run(run_load([target], requests, concurrency, count, keeps_ids))
    if result.errors:
        raise RuntimeError(f"{len(result.errors)} requests failed: {result.errors[0]}")
    return result


def _own_ms(target: tuple[str, int], ids: Sequence[str]) -> list[float]:
    """The milliseconds that the mock worker spent on each request, from the router's traces."""
    spent = []
    for request_id in ids:
        url = f"http://{target[0]}:{target[1]}/requests/{request_id}/trace"
        with urllib.request.urlopen(url, timeout=10) as answer:
            last = msgspec.json.decode(answer.read())["attempts"][-1]
        decode = last["decode"]
        own_us = decode["finished_us"] - decode["received_us"] if decode else 0
        spent.append(own_us / 1e3)
    return spent


def _request(contestant: Contestant, prompt: str, max_tokens: int, stream: bool = False) -> bytes:
    body = {
        "model": contestant.model_name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
    }
    if stream:
        body["stream"] = True
    host, port = contestant.targets[0]
    return post(PATH, f"{host}:{port}", msgspec.json.encode(body))


def _prompts(num_words: int, count: int) -> list[str]:
    """Prompts from words of Python's help pages. No two prompts of a run share a prefix, so that
    no prompt cache, the router's or a peer's, has a hit."""
    starts = [_rng.randrange(len(_WORDS) - num_words) for _ in range(count)]
    return [f"{_rng.random()} {' '.join(_WORDS[at : at + num_words])}" for at in starts]


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def recording_loads(fleet: SwitchedFleet) -> list[Load]:
    """One-token requests, and streams."""
    target = fleet.targets[0]
    short = [_request(fleet, each, max_tokens=1) for each in _prompts(SHORT_WORDS, 500)]
    streams = [
        _request(fleet, each, max_tokens=STREAM_TOKENS, stream=True)
        for each in _prompts(SHORT_WORDS, 100)
    ]
    return [
        ("one token", 250, lambda: _run(target, short, 16, 250)),
        (f"stream of {STREAM_TOKENS} tokens", 64, lambda: _run(target, streams, 32, 64)),
    ]


def calls(fleet: CountedFleet) -> Table:
    """The functions that one-token requests call, by file."""
    short = [_request(fleet, each, max_tokens=1) for each in _prompts(SHORT_WORDS, 500)]
    counted = fleet.calls(lambda: _run(fleet.targets[0], short, 1, _WARM_UP), _WARM_UP)
    by_file: Counter[str] = Counter()
    for place, num in counted.items():
        by_file[place.rpartition(":")[0]] += num
    table = Table("file", "calls", title=f"{counted.total()} calls per one-token request")
    for file, num in by_file.most_common():
        table.add_row(file, str(num))
    return table


# -- soak ---------------------------------------------------------------------------------------


def soak(fleet: RouterFleet, console: Console) -> bool:
    """Whether all requests succeeded and memory is flat.

    The heap reaches its working size during the first loads; growth counts from then on.
    """
    prompts = _prompts(SHORT_WORDS, 500)
    bodies = [_request(fleet, each, max_tokens=SOAK_TOKENS, stream=True) for each in prompts]

    def load() -> LoadResult:
        return uvloop.run(run_load(fleet.targets, bodies, SOAK_STREAMS, SOAK_REQUESTS))

    errors = [error for _ in range(SOAK_WARM_UPS) for error in load().errors]
    before = fleet.usage()
    result = load()
    after = fleet.usage()
    growth = after.rss_bytes / before.rss_bytes
    events = result.events / result.requests
    console.print(
        f"{result.requests:,} streams, {SOAK_STREAMS:,} at a time, through "
        f"{len(fleet.targets)} routers in {result.seconds:.1f} s: {len(result.errors)} errors, "
        f"{events:.1f} events each; memory of the routers {before.rss_bytes >> 20} MiB before, "
        f"{after.rss_bytes >> 20} MiB after"
    )
    errors += result.errors
    for error in errors[:5]:
        console.print(error, markup=False)
    return not errors and growth < SOAK_GROWTH


# -- the report ---------------------------------------------------------------------------------

_ROWS = (
    ("CPU-s per 1,000 one-token requests (32 concurrent)", "cpu_s_per_1k_short", "{:.2f}"),
    ("CPU-s per 1,000 requests of 1,000 words", "cpu_s_per_1k_long", "{:.2f}"),
    (f"CPU-s per 1M streamed tokens (64 x {STREAM_TOKENS})", "cpu_s_per_1m_tokens", "{:.1f}"),
    ("one-token requests/s", "requests_per_s", "{:,.0f}"),
    ("streamed tokens/s", "tokens_per_s", "{:,.0f}"),
    ("latency at concurrency 1, p50 ms", "latency_p50_ms", "{:.2f}"),
    ("latency at concurrency 1, p99 ms", "latency_p99_ms", "{:.2f}"),
    ("  of it not the mock's, p50 ms", "added_p50_ms", "{:.2f}"),
    ("  of it not the mock's, p99 ms", "added_p99_ms", "{:.2f}"),
)


def report(rounds: dict[str, list[Figures]]) -> Table:
    """Medians, each with its range; a peer's median is followed by its ratio to ours."""
    load, cores = os.getloadavg()[0], os.cpu_count()
    table = Table(
        title=f"router, Python {platform.python_version()}, {cores} cores, load {load:.1f}"
    )
    table.add_column("")
    for name in rounds:
        table.add_column(name, justify="right")
    for label, key, shape in _ROWS:
        medians: list[float] = []
        cells = []
        for figures in rounds.values():
            values = [value for each in figures if (value := getattr(each, key)) is not None]
            if not values:
                cells.append("-")
                continue
            medians.append(statistics.median(values))
            cell = shape.format(medians[-1])
            cell += f" ({shape.format(min(values))}-{shape.format(max(values))})"
            if len(medians) > 1:
                cell += f"  {medians[-1] / medians[0]:.2f}x"
            cells.append(cell)
        table.add_row(label, *cells)
    return table


def main(argv: list[str]) -> int:
    """Run and print the table."""
    arguments = _parser().parse_args(argv)
    model = Path(arguments.model)
    if arguments.peer and not arguments.peer_python:
        print(f"--peer {arguments.peer} needs --peer-python; how to get it:\n{HOW_TO_GET}")
        return 2
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    if arguments.decision:
        console.print(decision_costs())
        return 0
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(_OUTPUT_TEXT).ids

    def config(*roles: Role, num_routers: int = 1) -> RouterFleetConfig:
        return RouterFleetConfig(model, roles, ids, MAX_CONTEXT, num_routers, arguments.step_ms)

    if arguments.recording:
        with SwitchedFleet(config(Role.DECODE)) as switched:
            table = recording_cost(switched, recording_loads(switched))
        console.print(table)
        keep_table(arguments.record, "router recording", table)
        return 0
    if arguments.calls:
        with CountedFleet(config(Role.DECODE)) as counted:
            console.print(calls(counted))
        return 0
    if arguments.soak:
        with RouterFleet(config(Role.DECODE, Role.DECODE, num_routers=2)) as routers:
            return 0 if soak(routers, console) else 1
    rounds: dict[str, list[Figures]] = defaultdict(list)
    with ExitStack() as stack:
        roles = (Role.PREFILL, Role.DECODE) if arguments.apart else (Role.DECODE,)
        contestants: list[Contestant] = [stack.enter_context(RouterFleet(config(*roles)))]
        if arguments.peer:
            peer = DynamoPeer(arguments.peer_python, model, arguments.apart)
            contestants.append(stack.enter_context(peer))
        for _ in range(arguments.repeat):
            for contestant in contestants:
                rounds[contestant.name].append(measure(contestant))
    table = report(rounds)
    console.print(table)
    beside = f" beside {arguments.peer}" if arguments.peer else ""
    keep_table(arguments.record, f"router{' apart' if arguments.apart else ''}{beside}", table)
    console.print(decision_costs())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.router", description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help="prefill and decode workers")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time between the mock's steps")
    parser.add_argument("--peer", choices=("dynamo",))
    parser.add_argument("--peer-python", help="the peer's own python")
    parser.add_argument("--soak", action="store_true")
    parser.add_argument("--decision", action="store_true")
    parser.add_argument("--recording", action="store_true")
    parser.add_argument("--calls", action="store_true")
    add_record_option(parser)
    return parser
