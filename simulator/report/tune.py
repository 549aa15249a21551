"""The result of a search for better settings: the tried settings, and in words what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from process.number_text import exact, ms
from simulator.planning.tuning import Gain, Tried, Values, best_of, gain

_SHOWN = 12


def tune_table(title: str, tried: Sequence[Tried], meanings: Mapping[str, str]) -> Table:
    """The settings as they are, and the best ones that were tried."""
    base, *others = tried
    table = Table(title=title, title_justify="left")
    table.add_column("settings")
    for name in ("good", "gain", "95 %", "TTFT p99", "TPOT p99"):
        table.add_column(name, justify="right")
    ranked = sorted(others, key=lambda each: -each.served.choosing)
    for each in [base, *ranked[:_SHOWN]]:
        found = gain(base.served, each.served)
        gains = ("", "") if each is base else (_points(found.share), _interval(found))
        table.add_row(
            ", ".join(changes(base.values, each.values, meanings)) or "as they are",
            f"{each.served.good_share:.1%}",
            *gains,
            ms(each.served.ttft_p99_ms),
            ms(each.served.tpot_p99_ms),
        )
    return table


def advice(tried: Sequence[Tried], meanings: Mapping[str, str]) -> str:
    """Which settings to change, with the gain and how sure it is; or to change none."""
    base, best = tried[0], best_of(tried)
    served = f"{base.served.good_share:.1%} of the requests were good with the settings as they are"
    if best is base:
        return f"Change nothing: {served}, and no other settings did better."
    found = gain(base.served, best.served)
    words = " and ".join(changes(base.values, best.values, meanings))
    measured = (
        f"{_points(found.share)} in the parts of the trace that did not choose them "
        f"(95 %: {_interval(found)})"
    )
    if not found.is_sure:
        return f"Change nothing: {served}. {words} did best, but that may be chance: {measured}."
    return f"Set {words}: {served}, and {best.served.good_share:.1%} with these, {measured}."


def changes(base: Values, values: Values, meanings: Mapping[str, str]) -> list[str]:
    """The settings that differ, in words."""
    return [
        f"{meanings[name]} {exact(round(value, 1))} instead of {exact(round(base[name], 1))}"
        for name, value in values.items()
        if value != base[name]
    ]


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points"


def _interval(found: Gain) -> str:
    return f"{100 * found.low:+.1f} to {100 * found.high:+.1f}"
