"""Command line of `python -m bench.replay`.

    python -m bench.replay --trace FILE --url http://127.0.0.1:8000 [--speed 2] [--limit 500]
        [--span-s 600] [--shrink 16] [--prompts text|ids] [--json FILE]

`--trace` is any trace that `baton simulate` reads. The system must serve `/v1/completions` and
`/tokenize`, as Baton, vLLM and SGLang do. An API key comes from OPENAI_API_KEY.
Prints mean and percentiles of TTFT, TPOT and end-to-end latency, requests served, and the share of
prompts that came from caches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from bench.replay.player import Manner, Played, Player
from bench.replay.smaller_traces import shrunk
from bench.replay.vocabulary import Target, learn_vocabulary
from protocol.errors import BatonError, ConfigError
from simulator.commands.output_file import OutputFile
from simulator.report.summary import Spread
from simulator.traces.files import TraceOptions, read_trace
from simulator.traces.sessions import Trace

_SHOWN_ERRORS = 3


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__)
    parser.add_argument("--trace", required=True, help="a trace, as of `baton simulate`")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the system, without /v1")
    parser.add_argument("--model", help="its model; without it, the first one that it names")
    parser.add_argument("--speed", type=_number(1e-6), default=1.0, help="how many times faster")
    parser.add_argument("--limit", type=_count, help="only this many requests (or sessions)")
    parser.add_argument(
        "--span-s", type=_number(0), default=1800.0, help="when agents' sessions begin"
    )
    parser.add_argument("--shrink", type=_count, default=1, help="divides all numbers of tokens")
    parser.add_argument("--prompts", choices=("text", "ids"), default="text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="also write every request to this file")
    return parser.parse_args(argv)


def _number(least: float) -> Callable[[str], float]:
    """Reads a finite number of at least `least`."""

    def number(text: str) -> float:
        value = float(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least {least:g}")
        return value

    return number


def _count(text: str) -> int:
    """Reads a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return value


def main(argv: Sequence[str]) -> int:
    """Replay and report; returns the exit status: 2 if an argument or the trace is wrong, 1 if no
    request was served."""
    args = _arguments(argv)
    output = None if args.json is None else OutputFile("--json", args.json)
    try:
        if output is not None:
            output.check()  # fail now rather than after a long replay
        options = TraceOptions(args.seed, args.speed, args.limit, args.span_s)
        trace = shrunk(read_trace(args.trace, options), args.shrink)
        played = _replay(args, trace)
        if output is not None:
            output.write(json.dumps([asdict(each) for each in played], indent=1))
    except BatonError as error:
        print(f"bench.replay: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    Console().print(report(trace.name, played))
    failures = Counter(each.error for each in played if each.error)
    for reason, count in failures.most_common(_SHOWN_ERRORS):
        print(f"{count:,} failed: {reason}")
    return 0 if any(not each.error for each in played) else 1


def _replay(args: argparse.Namespace, trace: Trace) -> list[Played]:
    key = os.environ.get("OPENAI_API_KEY")
    url = args.url.rstrip("/")
    model = args.model or _first_model(Target(url, "", key))
    target = Target(url, model, key)
    manner = Manner(learn_vocabulary(target), args.prompts == "text", args.seed)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=trace.num_turns)
        player = Player(target, manner, lambda _: progress.advance(task))
        return asyncio.run(player.play(trace))


def _first_model(target: Target) -> str:
    """The first model that a system names. Raises BatonError."""
    try:
        return str(target.ask("/v1/models")["data"][0]["id"])
    except (LookupError, TypeError):
        raise BatonError(
            f"{target.url} names no model at /v1/models; name one by --model"
        ) from None


def report(title: str, played: Sequence[Played]) -> Table:
    """Latencies of the requests that were served."""
    served = [each for each in played if not each.error]
    table = Table("", "mean", "p50", "p90", "p99", title=title)
    rows = (
        ("TTFT ms", [each.ttft_s * 1000 for each in served]),
        ("TPOT ms", [each.tpot_s * 1000 for each in served if each.num_output > 1]),
        ("end to end ms", [each.total_s * 1000 for each in served]),
    )
    for name, values in rows:
        spread = Spread.of(values)
        if spread is not None:
            cells = (spread.mean, spread.p50, spread.p90, spread.p99)
            table.add_row(name, *(f"{each:,.1f}" for each in cells))
    prompt = sum(each.num_prompt for each in served)
    cached = sum(each.cached_tokens for each in served)
    share = f"{cached / prompt:.1%}" if prompt else "-"
    table.caption = f"{len(served):,} of {len(played):,} served; {share} of prompts from caches"
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
