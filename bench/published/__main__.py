"""Command line of `python -m bench.published`: figures of papers beside the simulator's.

    python -m bench.published [NAME ...] [--traces FOLDER]

Prints a table for each name: the published figure of each row, and the simulated one. Names are
mooncake-ttft, mooncake-hits, distserve, token-budget and chunk-rule; without any, all of them.
`--traces` has `mooncake_conversation.jsonl` and `mooncake_synthetic.jsonl`.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from bench.published import distserve, mooncake, sarathi
from bench.published.results import Result
from bench.tools.records import add_record_option, keep_table
from protocol.errors import BatonError

_WIDTH = 140
_RARELY = 500_000  # simulations make few circles of references, but millions of objects
RESULTS: Mapping[str, Callable[[Path], Result]] = {
    "mooncake-ttft": mooncake.ttft_by_policy,
    "mooncake-hits": mooncake.hits_of_a_common_cache,
    "distserve": lambda _: distserve.goodput(),
    "token-budget": lambda _: sarathi.token_budget(),
    "chunk-rule": lambda _: sarathi.chunk_rule(),
}
"""Each regenerates one table."""


def main(argv: Sequence[str]) -> int:
    """Simulate and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RESULTS))
    parser.add_argument("--traces", type=Path, default=Path("traces"), help="their folder")
    add_record_option(parser)
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in RESULTS]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(RESULTS)}")
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    gc.set_threshold(_RARELY)
    try:
        for name in args.names or RESULTS:
            table = RESULTS[name](args.traces).table()
            console.print(table)
            keep_table(args.record, f"published {name}", table)
    except BatonError as error:
        print(f"bench.published: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
