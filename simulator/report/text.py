"""A report in a terminal: one column for each simulated fleet, one row for each quantity."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from process.number_text import integer, ms, significant
from simulator.report.summary import Pool, Spread, Summary, Targets

Row = tuple[str, Callable[[Summary], str]]


def rows(targets: Targets) -> list[Row]:
    """The quantities of a report, each with its name."""
    good = f"good requests: TTFT {targets.ttft_ms:g} ms, TPOT {targets.tpot_ms:g} ms"
    return [
        ("requests served", _served),
        ("time, first arrival to last token", lambda e: f"{significant(e.duration_s)} s"),
        ("requests per second", lambda e: significant(e.requests_per_s)),
        ("output tokens per second", lambda e: integer(e.output_tokens_per_s)),
        (good, lambda e: f"{e.goodput_share:.1%}, {significant(e.goodput_per_s)} per second"),
        ("TTFT mean | p50 | p90 | p99", lambda e: _spread(e.ttft_ms)),
        ("TPOT mean | p50 | p90 | p99", lambda e: _spread(e.tpot_ms)),
        ("time between tokens, by steps", lambda e: _spread(e.itl_ms)),
        ("end to end", lambda e: _spread(e.total_ms)),
        ("prompt tokens found in caches", lambda e: f"{e.hit_share:.1%}"),
        ("prompts computed by another worker", lambda e: f"{e.split_share:.1%}"),
        ("KV moved", lambda e: f"{significant(e.sent_gb)} GB"),
        ("wait for KV after the first token", lambda e: _spread(e.exposed_ms)),
        ("prefill pool busy, mean | most", lambda e: _pool(e, "prefill", _busy)),
        ("decode pool busy, mean | most", lambda e: _pool(e, "decode", _busy)),
        ("decode steps with prompt chunks", lambda e: _pool(e, "decode", _chunks)),
        ("sequences in a decode step", lambda e: _pool(e, "decode", _batch)),
        ("preemptions", lambda e: integer(sum(each.preemptions for each in e.pools))),
        ("GPU seconds per request", lambda e: significant(e.gpu_s_per_request)),
        ("cost", _cost),
    ]


def report_table(title: str, summaries: Sequence[Summary], targets: Targets) -> Table:
    """The report of fleets that served the same trace."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for each in summaries:
        table.add_column(each.fleet, justify="right")
    for name, write in rows(targets):
        cells = [write(each) for each in summaries]
        if any(cells):
            table.add_row(name, *cells)
    return table


_COMPARED: tuple[Row, ...] = (
    ("good", lambda e: f"{e.goodput_share:.1%}"),
    ("good per second", lambda e: significant(e.goodput_per_s)),
    ("TTFT mean", lambda e: _part(e.ttft_ms, "mean")),
    ("p50", lambda e: _part(e.ttft_ms, "p50")),
    ("p99", lambda e: _part(e.ttft_ms, "p99")),
    ("TPOT mean", lambda e: _part(e.tpot_ms, "mean")),
    ("p99", lambda e: _part(e.tpot_ms, "p99")),
    ("from caches", lambda e: f"{e.hit_share:.1%}"),
    ("split", lambda e: f"{e.split_share:.1%}"),
    ("served", lambda e: integer(e.num_served)),
)


def comparison_table(title: str, summaries: Sequence[Summary], targets: Targets) -> Table:
    """Fleets or policies that served the same trace, one row for each."""
    caption = f"good: TTFT at most {targets.ttft_ms:g} ms, TPOT at most {targets.tpot_ms:g} ms"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("")
    for name, _ in _COMPARED:
        table.add_column(name, justify="right")
    for each in summaries:
        table.add_row(each.fleet, *(write(each) for _, write in _COMPARED))
    return table


_REFUSED = {
    "Overloaded": "refused: overload",
    "PromptTooLong": "too long for a worker's context or pool",
    "TargetUnreachable": "refused: late",
}


def _part(spread: Spread | None, name: str) -> str:
    return "" if spread is None else ms(getattr(spread, name))


def _served(summary: Summary) -> str:
    refused = "".join(
        f", {count:,} {_REFUSED.get(why, why)}" for why, count in summary.refused.items()
    )
    return f"{integer(summary.num_served)} of {integer(summary.num_requests)}{refused}"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return " | ".join(ms(each) for each in (spread.mean, spread.p50, spread.p90, spread.p99))


def _pool(summary: Summary, role: str, write: Callable[[Pool], str]) -> str:
    return next((write(each) for each in summary.pools if each.role == role), "")


def _busy(pool: Pool) -> str:
    return f"{pool.busy_share:.1%} | {pool.busiest_share:.1%}"


def _chunks(pool: Pool) -> str:
    return f"{pool.prefill_share:.1%} of the time"


def _batch(pool: Pool) -> str:
    return significant(pool.mean_batch)


def _cost(summary: Summary) -> str:
    if summary.usd is None:
        return ""
    each = summary.usd_per_million_output_tokens
    return f"{significant(summary.usd)} USD, {significant(each)} per million output tokens"
