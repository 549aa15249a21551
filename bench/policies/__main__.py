"""Command line of `python -m bench.policies`: Baton's placement beside other policies, simulated.

    python -m bench.policies --traces FOLDER [--traffic NAME ...] [--policies NAME ...]
        [--seeds 0 1 2] [--limit 3000] [--jobs 2] [--resume FILE] [--record FILE]

Simulates every trace with every policy and seed, and prints a table for each trace: good requests,
TTFT, TPOT, cache hits, and how far Baton is behind the best policy. Ends with status 1 if Baton's
goodput is more than 2 % below the best policy's for some trace. Results in the file of `--resume`
are not simulated again, as long as the code of router, scheduler and simulator is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import simulator
from bench.policies.cells import TRAFFIC, Cell, Score, score
from bench.tools.records import add_record_option, keep_table
from process.number_text import ms
from protocol.errors import BatonError
from simulator.planning.ledger import Ledger
from simulator.policies.names import BATON, POLICIES, RULES

_WITHIN = 0.02
_WIDTH = 150
_DECIDING = ("router", "scheduling", "simulator", "kv_transfer/handoff")
"""The packages whose code determines the results of a simulation."""


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description=__doc__)
    parser.add_argument("--traces", type=Path, default=Path("traces"), help="their folder")
    parser.add_argument(
        "--traffic",
        nargs="+",
        choices=list(TRAFFIC),
        default=list(TRAFFIC),
        metavar="NAME",
        help=", ".join(TRAFFIC),
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=list(POLICIES),
        default=list(RULES),
        metavar="NAME",
        help=", ".join(POLICIES),
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--limit", type=int, help="only this many requests (or sessions) of each")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once")
    parser.add_argument("--resume", type=Path, help="keep what is done here, and go on from it")
    add_record_option(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Simulate the cells that are not done yet, and report. Returns the exit status."""
    args = _arguments(argv)
    cells = [
        Cell(traffic, policy, seed, args.limit)
        for traffic in args.traffic
        for seed in args.seeds
        for policy in args.policies
    ]
    try:
        done = Done(args.resume, code_version())
        _fill(done, cells, args.traces, args.jobs)
    except BatonError as error:
        print(f"bench.policies: {error}", file=sys.stderr)
        return 1
    is_best = True
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for traffic in args.traffic:
        scores = {
            policy: [done.score(each) for each in cells if _is(each, traffic, policy)]
            for policy in args.policies
        }
        table = _table(traffic, scores)
        console.print(table)
        keep_table(args.record, f"policies {traffic}", table)
        verdict, holds = standing(scores)
        console.print(f"{traffic}: {verdict}")
        is_best = is_best and holds
    return 0 if is_best else 1


class Done:
    """The scores of cells that were simulated with this version of the code."""

    def __init__(self, path: Path | None, version: str) -> None:
        self._version = version
        self._ledger = Ledger(path, Score)

    def __contains__(self, cell: Cell) -> bool:
        return self._ledger.find(self._key(cell)) is not None

    def score(self, cell: Cell) -> Score:
        """The score of a cell that is done."""
        found = self._ledger.find(self._key(cell))
        assert found is not None, "every cell was simulated"
        return found

    def add(self, cell: Cell, score: Score) -> None:
        """Keep a score. Raises ConfigError if it cannot be written."""
        self._ledger.add(self._key(cell), score)

    def _key(self, cell: Cell) -> str:
        return f"{self._version} {msgspec.json.encode(cell).decode()}"


def _is(cell: Cell, traffic: str, policy: str) -> bool:
    return cell.traffic == traffic and cell.policy == policy


def _fill(done: Done, cells: Sequence[Cell], traces: Path, jobs: int) -> None:
    """Simulate the cells that are not done."""
    missing = [each for each in cells if each not in done]
    columns = (TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(cells), completed=len(cells) - len(missing))
        for cell, found in _scores(missing, traces, jobs):
            done.add(cell, found)
            progress.advance(task)


def _scores(cells: Sequence[Cell], traces: Path, jobs: int) -> Iterator[tuple[Cell, Score]]:
    if jobs == 1:
        yield from ((cell, score(cell, traces)) for cell in cells)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(score, cell, traces): cell for cell in cells}
        for each in as_completed(running):
            yield running[each], each.result()


def code_version() -> str:
    """A digest of the code that determines the results of a simulation."""
    digest, root = hashlib.sha256(), Path(simulator.__file__).parent.parent
    for package in _DECIDING:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def standing(scores: dict[str, list[Score]]) -> tuple[str, bool]:
    """Where Baton stands by its goodput, and whether it is the best or within 2 % of it."""
    good = {name: statistics.mean(e.good_share for e in each) for name, each in scores.items()}
    best = max(good, key=good.__getitem__)
    if BATON not in good:
        return f"{best} has the most good requests", True
    if best == BATON or good[BATON] >= good[best]:
        return "Baton has the most good requests", True
    behind = 1 - good[BATON] / good[best]
    return f"Baton is {behind:.1%} behind {best}", behind <= _WITHIN


_COLUMNS = (
    "good",
    "seeds",
    "per second",
    "TTFT mean",
    "p99",
    "TPOT mean",
    "p99",
    "cached",
    "split",
)


def _cells_of(scores: Sequence[Score]) -> tuple[str, ...]:
    def mean(name: str) -> float:
        return statistics.mean(getattr(each, name) for each in scores)

    shares = sorted(each.good_share for each in scores)
    return (
        f"{mean('good_share'):.1%}",
        f"{shares[0]:.1%} to {shares[-1]:.1%}",
        f"{mean('good_per_s'):.2f}",
        ms(mean("ttft_mean")),
        ms(mean("ttft_p99")),
        ms(mean("tpot_mean")),
        ms(mean("tpot_p99")),
        f"{mean('hit_share'):.1%}",
        f"{mean('split_share'):.0%}",
    )


def _table(traffic: str, scores: dict[str, list[Score]]) -> Table:
    table = Table("", *_COLUMNS, title=traffic)
    for name, each in scores.items():
        table.add_row(name, *_cells_of(each))
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
