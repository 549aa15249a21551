"""The result of a search: the ranking of fleets, and whether to split, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from process.number_text import ms, significant
from simulator.planning.race import Standing

_SHOWN = 12
_TOO_SHORT = "The trace is too short to show the limit: use more of it."
_REASONS = {
    "Overloaded": "are refused because of overload",
    "PromptTooLong": "are longer than a worker's context or KV pool",
    "TargetUnreachable": "are refused because they would be late",
}


def plan_table(title: str, standings: Sequence[Standing]) -> Table:
    """The best fleets, each at the highest load that it carried."""
    table = Table(title=title, title_justify="left")
    table.add_column("fleet")
    for name in (
        "GPUs",
        "load",
        "failed at",
        "good per second",
        "of the best",
        "TTFT p99",
        "TPOT p99",
    ):
        table.add_column(name, justify="right")
    best = standings[0].speed
    for each in standings[:_SHOWN]:
        failed = "" if each.failed_at is None else f"{significant(each.failed_at)} x"
        if each.trial is None:
            table.add_row(each.candidate.name, str(each.candidate.num_gpus), "none", failed)
            continue
        table.add_row(
            each.candidate.name,
            str(each.candidate.num_gpus),
            f"{significant(each.speed)} x",
            failed,
            significant(each.trial.good_per_s),
            f"{each.speed / best:.0%}",
            ms(each.trial.ttft_p99_ms),
            ms(each.trial.tpot_p99_ms),
        )
    return table


def verdict(standings: Sequence[Standing]) -> str:
    """The best fleet, and by how much it beats the best of the other kind and its runner-up. A
    fleet beats another one only if it carried a load that the other one did not."""
    carrying = [each for each in standings if each.speed]
    if not carrying:
        none = "No fleet of this many GPUs meets the targets, however low the load"
        return f"{none}{_why(standings)}."
    best = carrying[0]
    other = next((e for e in carrying if e.candidate.splits != best.candidate.splits), None)
    if other is not None and not best.beats(other):
        if other.failed_at is None:
            return (
                f"Undecided: {best.candidate.name} and {other.candidate.name} both carry "
                f"{significant(other.speed)} x the load. {_TOO_SHORT}"
            )
        best, other = sorted((best, other), key=lambda each: each.candidate.splits)
    lead = "Split" if best.candidate.splits else "Do not split"
    words = [f"{lead}: {best.candidate.name} carries {significant(best.speed)} x the load"]
    kind = "that does not split" if best.candidate.splits else "that splits"
    if other is not None:
        words.append(f"{_more(best, other)} the best {kind} ({other.candidate.name})")
    elif all(each.candidate.splits is best.candidate.splits for each in standings):
        words.append(f"no fleet {kind} can be made of these GPUs")
    else:
        words.append(f"no fleet {kind} meets the targets")
    same = [e for e in carrying if e.candidate.splits is best.candidate.splits and e is not best]
    if same:
        words.append(f"{_more(best, same[0])} the runner-up ({same[0].candidate.name})")
    return "; ".join(words) + "." + ("" if best.failed_at else f" {_TOO_SHORT}")


def _more(best: Standing, other: Standing) -> str:
    """The margin over another fleet, as far as the search knows both limits."""
    if not best.beats(other):
        return "as much, as far as this search can tell, as"
    assert other.failed_at is not None
    least = best.speed / other.failed_at - 1
    if best.failed_at is None:
        return f"at least {least:.0%} more than"
    return f"{least:.0%} to {best.failed_at / other.speed - 1:.0%} more than"


def _why(standings: Sequence[Standing]) -> str:
    """What most requests missed at the lowest load, of the fleet with the fewest misses."""
    failed = [each for each in standings if each.misses]
    if not failed:
        return ""
    least = min(failed, key=lambda each: sum(each.misses.values()))
    reason = max(least.misses, key=lambda each: least.misses[each])
    return f": most requests that are not good {_REASONS.get(reason, f'miss {reason}')}"
