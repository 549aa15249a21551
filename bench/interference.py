"""Effect of long prompts on running streams: one engine whole, one engine chunked, two apart.

    python -m bench.interference [--model M1|M2|FOLDER] [--seconds 30] [--device cuda]

Streams decode steadily while long prompts arrive (see bench.tools.stream_load), over HTTP, on
fleets of real processes with the same cores in total: (a) one worker that computes every prompt in
one step, (b) one worker that chunks prompts as the inter-token latency target allows, (c) a prefill
and a decode worker, each pinned to half of the cores as by `baton up`. With `--device cuda` all
workers of a fleet share one card. Each fleet is first measured undisturbed. The fleets take turns.
`--plot` needs matplotlib.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.engine.plot import load_pyplot
from bench.tools.checkpoints import SHAPES, add_tokenizer, benchmark_checkpoint
from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.records import add_record_option, keep_table
from bench.tools.stream_load import Phase, StreamClient, StreamLoad
from engine.checkpoint.config import load_model_config
from process.core_shares import by_neighbourhood, core_shares
from process.cores import ranges_of, usable_cores
from protocol.errors import BatonError

WARM_UP_S = 3.0
QUIET_S = 10.0


@dataclass(frozen=True)
class Contestant:
    """A way to divide the cores: prefill workers beside one decode worker, flags for both roles,
    and flags for one role."""

    name: str
    label: str
    num_prefill: int
    flags: tuple[str, ...]
    role_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def contestants(
    cores: Sequence[int], longest: int, itl_target_ms: float, device: str = "cpu"
) -> list[Contestant]:
    """The three contestants, on these cores and `device`; `longest` is the longest prompt in
    tokens."""
    device_flag = f"--device={device}"
    half = max(1, len(cores) // 2)
    together, apart = f"--torch-threads={len(cores)}", f"--torch-threads={half}"
    shares = core_shares(cores, 2, half) if device == "cpu" else []
    kept = {
        role: (f"--cores={','.join(ranges_of(share))}",)
        for role, share in zip(("prefill", "decode"), shares, strict=False)
    }
    whole = (f"--chunk-min-tokens={longest}", f"--chunk-max-tokens={longest}")
    target = f"--itl-target-ms={itl_target_ms}"
    return [
        Contestant("a", "together, whole prompts", 0, (device_flag, together, *whole)),
        Contestant("b", "together, chunked", 0, (device_flag, together, target)),
        Contestant("c", "prefill and decode apart", 1, (device_flag, apart, target), kept),
    ]


@dataclass
class Result:
    """The phases of every turn of one contestant: (undisturbed, disturbed)."""

    contestant: Contestant
    turns: list[tuple[Phase, Phase]]

    def gaps_ms(self, disturbed: bool) -> list[float]:
        """All gaps between tokens of the streams."""
        return sorted(1e3 * gap for turn in self.turns for gap in turn[disturbed].gaps_s)

    def ttft_ms(self) -> list[float]:
        """The times to first token of all long prompts."""
        return sorted(1e3 * each for turn in self.turns for each in turn[1].ttft_s)

    def rate(self, name: str) -> float:
        """Median over the turns of a count per second, while disturbed."""
        return statistics.median(getattr(t[1], name) / t[1].seconds for t in self.turns)


def quantile(values: list[float], share: float) -> float:
    """The smallest of the sorted `values` that a `share` of them does not exceed."""
    return values[min(len(values) - 1, int(share * len(values)))]


def run_contestant(
    each: Contestant, model: str, load: StreamLoad, seconds: float
) -> tuple[Phase, Phase]:
    """One turn on its own fleet."""
    longest = load.long_prompt + load.long_tokens
    tokens = load.num_streams * (load.stream_prompt + load.stream_tokens) + 16 * longest
    flags = (*each.flags, f"--num-blocks={tokens // 16}")
    config = FleetConfig(
        model, 1, each.num_prefill, 1, worker_flags=flags, role_flags=each.role_flags
    )
    with BenchFleet(config) as fleet:
        client = StreamClient(fleet.url("router-1"), load)
        return asyncio.run(client.run(WARM_UP_S, QUIET_S, seconds))


def report(results: list[Result], ttft_target_ms: float, itl_target_ms: float) -> Table:
    """One row per contestant; goodput is the share that met its target."""
    table = Table(
        "fleet",
        "ITL undisturbed p50 / p99 ms",
        "ITL p50 / p99 ms",
        "p99 over undisturbed",
        "TTFT p50 / p99 ms",
        "stream tokens/s",
        "prompt tokens/s",
        f"tokens within {itl_target_ms:g} ms",
        f"prompts within {ttft_target_ms:g} ms",
    )
    for result in results:
        quiet, gaps, ttft = result.gaps_ms(False), result.gaps_ms(True), result.ttft_ms()
        table.add_row(
            f"({result.contestant.name}) {result.contestant.label}",
            f"{quantile(quiet, 0.5):.1f} / {quantile(quiet, 0.99):.1f}",
            f"{quantile(gaps, 0.5):.1f} / {quantile(gaps, 0.99):.1f}",
            f"{quantile(gaps, 0.99) / quantile(quiet, 0.99):.2f}x",
            f"{quantile(ttft, 0.5):,.0f} / {quantile(ttft, 0.99):,.0f}",
            f"{result.rate('stream_tokens'):,.0f}",
            f"{result.rate('prompt_tokens'):,.0f}",
            f"{_share(gaps, itl_target_ms):.1%}",
            f"{_share(ttft, ttft_target_ms):.0%}",
        )
    return table


def ratios(results: list[Result]) -> list[str]:
    """The measured ratios behind the claims about the three contestants."""
    p99 = {r.contestant.name: quantile(r.gaps_ms(True), 0.99) for r in results}
    quiet = quantile(results[2].gaps_ms(False), 0.99)
    total = {r.contestant.name: r.rate("stream_tokens") + r.rate("prompt_tokens") for r in results}
    return [
        f"p99 inter-token latency: (a) over (b) {p99['a'] / p99['b']:.1f}x, "
        f"(a) over (c) {p99['a'] / p99['c']:.1f}x, (c) over undisturbed {p99['c'] / quiet:.2f}x",
        f"tokens/s in all: (b) over (a) {total['b'] / total['a']:.2f}x, "
        f"(c) over (a) {total['c'] / total['a']:.2f}x",
    ]


def plot(results: list[Result], path: Path) -> None:
    """Share of tokens against inter-token latency, undisturbed and disturbed."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for result, color in zip(results, ("tab:red", "tab:orange", "tab:blue"), strict=True):
        for disturbed in (False, True):
            gaps = result.gaps_ms(disturbed)
            shares = [1 - i / len(gaps) for i in range(len(gaps))]
            label = f"({result.contestant.name}) {result.contestant.label}"
            axes.plot(
                gaps,
                shares,
                color=color,
                linestyle="-" if disturbed else ":",
                label=label if disturbed else None,
            )
    axes.set(xscale="log", yscale="log", xlabel="inter-token latency, ms (dotted: undisturbed)")
    axes.set_ylabel("share of tokens that took longer")
    axes.set_xlim(left=1.0)  # smaller gaps are tokens that came together
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(path)


def _share(values: list[float], target: float) -> float:
    return sum(value <= target for value in values) / len(values)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.interference", description=__doc__)
    parser.add_argument("--model", default="M1", help="M1, M2 or a checkpoint's folder")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--cores", type=int, help="of each fleet; none: all")
    parser.add_argument("--streams", type=int, default=8, help="that decode all the time")
    parser.add_argument("--stream-tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of a long prompt")
    parser.add_argument("--arrivals", type=float, default=1.5, help="long prompts per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a turn, disturbed")
    parser.add_argument("--repeat", type=int, default=2, help="turns of each fleet")
    parser.add_argument("--itl-target-ms", type=float, default=25.0)
    parser.add_argument("--ttft-target-ms", type=float, default=2000.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="write a picture here")
    add_record_option(parser)
    return parser.parse_args()


def _compare(options: argparse.Namespace, console: Console) -> None:
    folder = benchmark_checkpoint(options.model) if options.model in SHAPES else Path(options.model)
    if options.model in SHAPES:
        add_tokenizer(folder)
    load = StreamLoad(
        model=folder.name,
        vocab_size=load_model_config(folder).vocab_size,
        num_streams=options.streams,
        stream_tokens=options.stream_tokens,
        long_prompt=options.prompt_tokens,
        arrivals_per_s=options.arrivals,
        seed=options.seed,
    )
    longest = options.prompt_tokens + load.stream_prompt
    cores = by_neighbourhood(usable_cores())[: options.cores]
    fleets = contestants(cores, longest, options.itl_target_ms, options.device)
    results = [Result(each, []) for each in fleets]
    for turn in range(options.repeat):
        for result in results:
            console.print(f"turn {turn + 1}: {result.contestant.label}")
            result.turns.append(
                run_contestant(result.contestant, str(folder), load, options.seconds)
            )
    console.print(
        f"{options.model} on {options.device}, {len(cores)} cores, {options.streams} streams, "
        f"{options.arrivals:g} prompts of {options.prompt_tokens:,} tokens per second, "
        f"{options.repeat} x {options.seconds:g} s, seed {options.seed}"
    )
    table = report(results, options.ttft_target_ms, options.itl_target_ms)
    console.print(table)
    name = f"interference {folder.name} {options.itl_target_ms:g} ms"
    keep_table(options.record, name, table)
    for line in ratios(results):
        console.print(line)
    if options.plot is not None:
        plot(results, options.plot)


def main() -> int:
    """The command line."""
    try:
        _compare(_parse(), Console(width=160))
    except BatonError as error:
        print(f"bench.interference: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
