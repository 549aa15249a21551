"""Tiers below a pool of KV blocks: the share of blocks that each provides, and the gain in speed.

    python -m bench.tiers [--model FOLDER|FILE.gguf] [--pool-blocks 256] [--prefix-tokens 480]
        [--requests 64] [--rounds 3] [--seed 1]

Requests choose documents by Zipf's law and ask something new about them. The documents fill the
pool four times, or half of it. Each contestant is a router and one decode worker: without tiers,
with host memory that holds everything, and with host memory as large as the pool and a disk below
it. All run at once and take turns, round by round; the others are idle meanwhile. Ratios compare
the same round of two contestants, and their median is shown. The first round only fills the caches.
Exits with 1 if two contestants answer differently, if a block of a tier fails, or if tiers make
documents that fit into the pool more than 2 % slower; noise of that size takes more rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.paths import DEMO_MODEL
from bench.tools.records import add_record_option, keep_table
from engine.checkpoint.config import load_model_config
from kv_transfer.tiers.block_file import PAGE
from process.number_text import count, integer, percent, times

BLOCK = 16
NEW_TOKENS, ANSWER_TOKENS = 16, 8
NUM_CLIENTS = 2
ZIPF = 1.0
FULL, FITTING = 4.0, 0.5
"""Working sets, as parts of the pool."""
MOST_LOSS = 0.02
"""The most that tiers may cost if the pool holds everything."""
_WATCHED = (
    "prefill_tokens",
    "cached_tokens",
    "loaded_tokens",
    "host_tier_loaded_bytes",
    "disk_tier_loaded_bytes",
    "host_tier_missed_blocks",
    "host_tier_failures",
    "disk_tier_failures",
)


@dataclass
class Contestant:
    """A fleet, and what it did in each round."""

    name: str
    fleet: BenchFleet
    seconds: list[float] = field(default_factory=list)
    grown: list[dict[str, int]] = field(default_factory=list)
    answers: list[list[str]] = field(default_factory=list)

    def counters(self) -> dict[str, int]:
        """The worker's counters, once it has reported that it is idle."""
        self.fleet.left_over()
        (worker,) = self.fleet.workers("router-1").values()
        return {name: worker["counters"].get(name, 0) for name in _WATCHED}

    def hold(self, prompts: Sequence[list[int]]) -> None:
        """Send the prompts of one round."""
        before, url = self.counters(), f"{self.fleet.url('router-1')}/v1/completions"
        started = time.perf_counter()
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            self.answers.append(list(pool.map(lambda prompt: _ask(url, prompt), prompts)))
        self.seconds.append(time.perf_counter() - started)
        after = self.counters()
        self.grown.append({name: after[name] - before[name] for name in _WATCHED})

    def share(self, name: str) -> float:
        """The part of all prompt tokens of the measured rounds that a counter counts."""
        tokens = ("prefill_tokens", "cached_tokens", "loaded_tokens")
        whole = sum(each[part] for each in self.grown[1:] for part in tokens)
        return sum(each[name] for each in self.grown[1:]) / max(1, whole)

    def speed(self, other: Contestant) -> float:
        """This contestant's speed as a multiple of the other's."""
        pairs = zip(other.seconds[1:], self.seconds[1:], strict=True)
        return median(theirs / ours for theirs, ours in pairs)

    @property
    def num_failures(self) -> int:
        """Blocks that a tier could not keep, or that were not as they had been written."""
        names = ("host_tier_failures", "disk_tier_failures")
        return sum(each[name] for each in self.grown for name in names)

    @property
    def disk_share(self) -> float:
        """The part of all prompt tokens whose blocks were read from the disk first."""
        loaded = sum(each["host_tier_loaded_bytes"] for each in self.grown[1:])
        from_disk = sum(each["disk_tier_loaded_bytes"] for each in self.grown[1:])
        return min(1.0, from_disk / loaded) * self.share("loaded_tokens") if loaded else 0.0


def _ask(url: str, prompt: list[int]) -> str:
    body = {
        "prompt": prompt,
        "model": "bench",
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


@dataclass(frozen=True)
class Sizes:
    """Sizes of the pool and of the tiers below it."""

    pool_blocks: int
    block_bytes: int

    def flags(self, host: float, disk: float, folder: Path) -> tuple[str, ...]:
        """The flags of a worker whose tiers hold `host` and `disk` times its pool."""
        host_bytes = round(host * self.pool_blocks) * self.block_bytes
        slot = -(-(self.block_bytes + PAGE) // PAGE) * PAGE
        disk_bytes = round(disk * self.pool_blocks) * slot + PAGE
        flags = [f"--num-blocks={self.pool_blocks}"]
        if host:
            flags.append(f"--host-tier-bytes={host_bytes}")
        if disk:
            flags += [f"--disk-tier-bytes={disk_bytes}", f"--disk-tier-dir={folder}"]
        return tuple(flags)


def rounds(
    settings: argparse.Namespace, vocab_size: int, working_set: float
) -> Iterator[list[list[int]]]:
    """The prompts of each round, the first of which has every document once."""
    rng = random.Random(settings.seed)
    prefix = settings.prefix_tokens
    number = max(2, round(working_set * settings.pool_blocks * BLOCK / prefix))
    documents = [[rng.randrange(1, vocab_size) for _ in range(prefix)] for _ in range(number)]
    weights = [1 / (rank + 1) ** ZIPF for rank in range(number)]

    def asked(document: list[int]) -> list[int]:
        return document + [rng.randrange(1, vocab_size) for _ in range(NEW_TOKENS)]

    yield [asked(each) for each in documents]
    for _ in range(settings.rounds):
        chosen = rng.choices(documents, weights, k=settings.requests)
        yield [asked(each) for each in chosen]


def compare(settings: argparse.Namespace, working_set: float, console: Console) -> list[str]:
    """Print one table; returns what is wrong."""
    config = load_model_config(Path(settings.model))
    layout = config.kv_layout("", BLOCK, config.dtype)
    sizes = Sizes(settings.pool_blocks, layout.block_bytes)
    arms = {"no tiers": (0, 0), "host memory": (2 * FULL, 0), "host memory and disk": (1, 2 * FULL)}
    with ExitStack() as stack:
        contestants = []
        for name, (host, disk) in arms.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            flags = ("--device=cpu", "--torch-threads=1", *sizes.flags(host, disk, folder))
            fleet_config = FleetConfig(
                settings.model,
                num_prefill=0,
                worker_flags=(*flags, "--served-model-name=bench"),
                router_flags=("--served-model-name=bench",),
            )
            contestants.append(Contestant(name, stack.enter_context(BenchFleet(fleet_config))))
        for number, prompts in enumerate(rounds(settings, config.vocab_size, working_set)):
            turn = contestants[number % len(contestants) :] + contestants
            for each in turn[: len(contestants)]:
                each.hold(prompts)
    table = _table(contestants, working_set, settings.prefix_tokens)
    console.print(table)
    keep_table(settings.record, f"tiers {times(working_set)}", table)
    return complaints(contestants, working_set)


def complaints(contestants: Sequence[Contestant], working_set: float) -> list[str]:
    """What is wrong with the outcome; the first contestant has no tiers."""
    plain, found = contestants[0], []
    for each in contestants[1:]:
        if each.answers != plain.answers:
            found.append(f"{each.name}: other answers than without tiers")
        if each.num_failures:
            found.append(f"{each.name}: {count(each.num_failures, 'block')} failed")
        speed = each.speed(plain)
        if working_set <= 1 and speed < 1 - MOST_LOSS:
            found.append(f"{each.name}: {percent(1 - speed)} slower although documents fit")
    return found


def _table(contestants: Sequence[Contestant], working_set: float, prefix_tokens: int) -> Table:
    table = Table(title=f"documents fill the pool {times(working_set)}")
    table.add_column("contestant")
    for name in ("tokens/s", "of no tiers", "pool", "host memory", "disk", "computed", "failed"):
        table.add_column(name, justify="right")
    plain = contestants[0]
    for each in contestants:
        num_requests = len(each.answers[-1]) * len(each.seconds[1:])
        num_tokens = num_requests * (prefix_tokens + NEW_TOKENS + ANSWER_TOKENS)
        table.add_row(
            each.name,
            integer(num_tokens / sum(each.seconds[1:])),
            times(each.speed(plain)),
            percent(each.share("cached_tokens")),
            percent(each.share("loaded_tokens") - each.disk_share),
            percent(each.disk_share),
            percent(each.share("prefill_tokens")),
            integer(each.num_failures),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Both tables; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.tiers", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", default=str(DEMO_MODEL), help="a checkpoint")
    for name, default in (
        ("pool-blocks", 256), ("prefix-tokens", 480), ("requests", 64), ("rounds", 3), ("seed", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    add_record_option(parser)
    settings: Any = parser.parse_args(arguments)
    console = Console()
    found = [each for share in (FULL, FITTING) for each in compare(settings, share, console)]
    for each in found:
        console.print(each)
    console.print("FAILED" if found else "ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
