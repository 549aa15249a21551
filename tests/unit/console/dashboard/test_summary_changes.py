"""A reader that takes any of the summaries knows what one that takes all of them knows."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from console.dashboard.summary_changes import LISTS, Versions, merged
from tests.effort import times

VALUES = st.none() | st.integers(0, 3) | st.lists(st.integers(0, 2), max_size=2)
WORKERS = st.lists(
    st.fixed_dictionaries(
        {"worker_id": st.sampled_from(["d1", "d2", "p1"])},
        optional={"state": VALUES, "num_running": VALUES},
    ),
    unique_by=lambda each: each["worker_id"],
    max_size=3,
)
PAIRS = st.lists(
    st.fixed_dictionaries({"pair_id": st.sampled_from(["p1 d1", "p1 d2"])}, optional={"x": VALUES}),
    unique_by=lambda each: each["pair_id"],
)
SUMMARIES = st.fixed_dictionaries(
    {"workers": WORKERS, "pairs": PAIRS}, optional={"totals": VALUES, "events": VALUES}
)


def without_nulls(value: Any) -> Any:
    """Null means "not known", as does a value that is not there."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


@settings(max_examples=times(60, 2000))
@given(st.lists(st.tuples(SUMMARIES, st.booleans()), min_size=1, max_size=8))
def test_a_reader_that_skips_summaries_misses_nothing(steps: list[tuple[Any, bool]]) -> None:
    versions, seen, known = Versions(), 0, {}
    for number, (summary, is_read) in enumerate(steps, start=1):
        versions.update(number, summary)
        if is_read or number == len(steps):
            known, seen = merged(known, versions.since(seen)), number
            orders = {order: known.pop(order) for _, order in LISTS.values()}
            assert without_nulls(known) == without_nulls(summary)
            assert orders == {
                order: [each[key] for each in summary[name]] for name, (key, order) in LISTS.items()
            }
            known |= orders
    assert versions.since(seen) == {"workers": [], "pairs": []}


def test_only_what_changed_is_sent() -> None:
    versions = Versions()
    worker = {"worker_id": "d1", "state": "ready", "num_running": 1}
    versions.update(1, {"workers": [worker], "totals": {"goodput": 1.0}})
    versions.update(2, {"workers": [{**worker, "num_running": 2}], "totals": {"goodput": 1.0}})
    assert versions.since(1) == {"workers": [{"worker_id": "d1", "num_running": 2}]}


def test_a_reader_keeps_lists_that_no_change_speaks_of() -> None:
    known = {"workers": [{"worker_id": "w"}], "goodput": 0.5}
    assert merged(known, {"goodput": 0.9}) == {**known, "goodput": 0.9}
