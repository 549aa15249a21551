"""The result of a search: the ranking of fleets, and whether to split, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from process.number_text import ms, significant
from simulator.planning.race import Standing

_SHOWN = 12


def plan_table(title: str, standings: Sequence[Standing]) -> Table:
    """The best fleets, each at the highest load that it carried."""
    table = Table(title=title, title_justify="left")
    table.add_column("fleet")
    for name in ("load", "failed at", "good per second", "of the best", "TTFT p99", "TPOT p99"):
        table.add_column(name, justify="right")
    best = standings[0].speed
    for each in standings[:_SHOWN]:
        failed = "" if each.failed_at is None else f"{significant(each.failed_at)} x"
        if each.trial is None:
            table.add_row(each.candidate.name, "none", failed)
            continue
        table.add_row(
            each.candidate.name,
            f"{significant(each.speed)} x",
            failed,
            significant(each.trial.good_per_s),
            f"{each.speed / best:.0%}",
            ms(each.trial.ttft_p99_ms),
            ms(each.trial.tpot_p99_ms),
        )
    return table


def verdict(standings: Sequence[Standing]) -> str:
    """The best fleet, and by how much it beats the best of the other kind and its runner-up."""
    carrying = [each for each in standings if each.speed]
    if not carrying:
        return "No fleet of this many GPUs meets the targets, however low the load."
    best = carrying[0]
    other = next((e for e in carrying if e.candidate.splits != best.candidate.splits), None)
    kind = "splits" if other is not None and other.candidate.splits else "does not split"
    lead = "Split" if best.candidate.splits else "Do not split"
    words = [f"{lead}: {best.candidate.name} carries {significant(best.speed)} x the load"]
    if other is None:
        only = "no fleet that splits" if lead == "Do not split" else "no fleet that does not split"
        words.append(f"{only} meets the targets")
    else:
        words.append(f"{_more(best, other)} than the best that {kind} ({other.candidate.name})")
    if len(carrying) > 1 and carrying[1] is not other:
        words.append(
            f"{_more(best, carrying[1])} than the runner-up ({carrying[1].candidate.name})"
        )
    limit = "" if best.failed_at else " The trace is too short to show the limit: use more of it."
    return "; ".join(words) + "." + limit


def _more(best: Standing, other: Standing) -> str:
    return f"{best.speed / other.speed - 1:.0%} more"
