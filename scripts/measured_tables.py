"""The measured tables of the documents, made from the records in docs/measured/.

    python scripts/measured_tables.py [--write]

Names the documents that differ from the records, or writes the tables between their markers. Also
makes the tables of docs/performance.md that put machines side by side. A test checks that the
documents are current.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from bench.tools.records import MeasuredTable, Record, read_record

DOCS = Path(__file__).parents[1] / "docs"
RECORDS = DOCS / "measured"
MARKED = re.compile(r"(?<=<!-- measured: )([^>]*?)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)

ENGINES = {
    "Zen 5": "zen5",
    "Sapphire Rapids": "sapphire_rapids",
    "Emerald Rapids": "emerald_rapids",
}
"""The machines that docs/performance.md compares, and their records."""

TARGETS = {
    "prefill 512": (1.2, 1.2),
    "prefill 2,048": (1.2, 1.2),
    "decode 1 at 512": (1.4, 1.4),
    "decode 8 at 512": (2.0, 1.5),
    "decode 32 at 512": (2.0, 1.5),
}
"""Wanted tokens/s over the best peer's, for M1 and M2."""

MODELS = ("M1", "M2")


def documents() -> list[Path]:
    """The documents that have measured tables."""
    return [path for path in sorted(DOCS.rglob("*.md")) if MARKED.search(path.read_text("utf-8"))]


def current(document: Path) -> str:
    """The document's text with the tables of the records. Raises KeyError if a record lacks one."""
    text = document.read_text(encoding="utf-8")
    return MARKED.sub(lambda found: found[1] + found[2] + rendered(found[1]), text)


def rendered(name: str) -> str:
    """A table in Markdown: a comparison, or `FILE, TABLE` of a record, with its origin below."""
    if name in COMPARISONS:
        return markdown(*COMPARISONS[name]())
    file, _, title = name.partition(", ")
    record = record_of(file)
    table = record.tables[title]
    return markdown(table.columns, table.rows) + _origin(record, table)


@cache
def record_of(file: str) -> Record:
    """The record docs/measured/FILE.json."""
    return read_record(RECORDS / f"{file}.json")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    head, *body = (
        "".join(f"| {cell} " if cell else "| " for cell in line) + "|\n"
        for line in (columns, *rows)
    )
    return f"{head}|{'---|' * len(columns)}\n{''.join(body)}"


def _origin(record: Record, table: MeasuredTable) -> str:
    """A line below the table; empty if nothing is known."""
    if not table.recorded:
        return ""
    commit = f"in {table.commit}" if table.commit else "(commit not recorded)"
    command = f": `{table.command}`" if table.command else ""
    machine = f"{record.machine}, " if record.machine else ""
    return f"\n{machine}{table.recorded} {commit}{command}\n"


def engines() -> tuple[list[str], list[list[str]]]:
    """Tokens/s over the best peer: in process, then over HTTP; bold below the target."""
    pairs = [(machine, model) for machine in ENGINES for model in MODELS]
    columns = ["work", "target", *(f"{model}, {machine}" for machine, model in pairs)]
    rows = []
    for work, targets in TARGETS.items():
        wanted = dict(zip(MODELS, targets, strict=True))
        shown = " / ".join(f"{each:g}x" for each in dict.fromkeys(targets))
        cells = [
            " / ".join(
                _bold_below(least_ratio(record_of(ENGINES[machine]), name, work), wanted[model])
                for name in (f"engine {model}", f"engine {model} served")
            )
            for machine, model in pairs
        ]
        rows.append([work, shown, *cells])
    return columns, rows


def least_ratio(record: Record, name: str, work: str) -> float:
    """Our tokens/s over those of the best peer in a table of bench.engine."""
    table = record.tables[name]
    over = [table.column(each)[work] for each in table.columns if each.startswith("over ")]
    return min(float(each.removesuffix("x")) for each in over if each)


def _bold_below(ratio: float, wanted: float) -> str:
    return f"{ratio:.2f}" if ratio >= wanted else f"**{ratio:.2f}**"


def limits() -> tuple[list[str], list[list[str]]]:
    """The share of the machine's limits that the engine reaches."""
    rows: dict[str, list[str]] = {
        "decode 1: bytes/s over a packed matrix-vector product's (target 80 %)": [],
        "prefill 2,048: FLOP/s over a large product's (70 %)": [],
        "decode 8, context 512 to 8,192: bytes/s over the product's (within 20 %)": [],
        "bookkeeping of a step (3 %)": [],
        "peak memory of a start over weights and KV (1.3x)": [],
    }
    for file in ENGINES.values():
        tables = record_of(file).tables
        sweep = [int(_percent(each)) for each in tables["engine M1 sweep"].column(_SHARE).values()]
        cells = (
            _shares(tables, "decode 1 at 512"),
            _shares(tables, "prefill 2,048"),
            f"{min(sweep)} to {max(sweep)} %",
            *(
                tables["start"].column("figure").get(each, "")
                for each in ("bookkeeping of a step", "peak memory over weights and KV")
            ),
        )
        for row, cell in zip(rows.values(), cells, strict=True):
            row.append(cell)
    return ["", *ENGINES], [[label, *cells] for label, cells in rows.items()]


_SHARE = "share of limit"


def _shares(tables: dict[str, MeasuredTable], work: str) -> str:
    shares = {model: tables[f"engine {model}"].column(_SHARE)[work] for model in MODELS}
    return ", ".join(f"{model} {_percent(share)} %" for model, share in shares.items() if share)


def _percent(cell: str) -> str:
    """The number before the first percent sign."""
    return cell.partition("%")[0].strip()


def fleets() -> tuple[list[str], list[list[str]]]:
    """The effect of long prompts on running streams on three fleets, from tables of
    bench.interference."""
    columns = [
        "machine, target",
        "(c): p99 over undisturbed (wanted 1.2x)",
        "p99 of (a) over (c) (5x)",
        "p99 of (a) over (b) (3x)",
        "all tokens/s, (b) over (a) (0.95)",
        "all tokens/s, (c) over (a)",
    ]
    rows = []
    for machine, file in ENGINES.items():
        for name, table in record_of(file).tables.items():
            if name.startswith("interference M1"):
                rows.append([f"{machine}, {_target_ms(table)} ms", *_ratios(table)])
    return columns, rows


def _target_ms(table: MeasuredTable) -> str:
    within = next(each for each in table.columns if each.startswith("tokens within "))
    return within.removeprefix("tokens within ").removesuffix(" ms")


def _ratios(table: MeasuredTable) -> list[str]:
    def by_fleet(column: str) -> dict[str, float]:
        cells = table.column(column).items()
        return {
            name[1]: float(cell.rpartition("/")[2].replace(",", "").removesuffix("x"))
            for name, cell in cells
        }

    p99, over = by_fleet("ITL p50 / p99 ms"), by_fleet("p99 over undisturbed")
    streams, prompts = by_fleet("stream tokens/s"), by_fleet("prompt tokens/s")
    total = {name: streams[name] + prompts[name] for name in streams}
    has_c = "c" in p99
    return [
        f"{over['c']:.2f}x" if has_c else "",
        f"{p99['a'] / p99['c']:.1f}x" if has_c else "",
        f"{p99['a'] / p99['b']:.1f}x",
        _bold_below(total["b"] / total["a"], 0.95),
        f"{total['c'] / total['a']:.2f}" if has_c else "",
    ]


COMPARISONS: dict[str, Callable[[], tuple[list[str], list[list[str]]]]] = {
    "engines": engines,
    "limits": limits,
    "fleets": fleets,
}


def main() -> int:
    """Check the documents, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables")
    options = parser.parse_args()
    stale = [path for path in documents() if path.read_text("utf-8") != current(path)]
    for path in stale:
        if options.write:
            path.write_text(current(path), encoding="utf-8")
        print(path.relative_to(DOCS.parent))
    return int(bool(stale) and not options.write)


if __name__ == "__main__":
    sys.exit(main())
