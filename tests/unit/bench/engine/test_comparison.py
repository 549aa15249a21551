"""What `bench.engine` prints of its figures, and which works it takes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench.engine.comparison import chosen, report
from bench.engine.in_process import EngineKind
from bench.engine.limits import StepNeeds
from bench.engine.workloads import WORKS, Work
from protocol.errors import BatonError


def test_a_ratio_is_the_median_of_the_turns():
    """The second turn was slow for both, the third for us alone."""
    work = Work("decode", 8, 512)
    figures = {work: {"ours": [200.0, 90.0, 100.0], "theirs": [100.0, 45.0, 100.0]}}
    shown = io.StringIO()
    Console(width=200, file=shown).print(report(figures, StepNeeds(1, 1, 1, 1), None, {}))
    text = shown.getvalue()
    assert "2.00x" in text
    assert "100 (90-200)" in text


def test_each_of_our_engines_has_a_ratio_to_each_peer():
    work = Work("decode", 8, 512)
    figures = {work: {"ours": [100.0], "ours too": [300.0], "a peer": [50.0], "another": [200.0]}}
    table = report(figures, StepNeeds(1, 1, 1, 1), None, {}, num_ours=2)
    cells = {str(column.header): next(iter(column.cells)) for column in table.columns}
    assert {name: cell for name, cell in cells.items() if "over" in name} == {
        "over a peer": "2.00x",
        "over another": "0.50x",
        "ours too over a peer": "6.00x",
        "ours too over another": "1.50x",
    }
    alone = {work: {"ours": [100.0], "ours too": [50.0]}}
    table = report(alone, StepNeeds(1, 1, 1, 1), None, {}, num_ours=2)
    assert "over ours too" in [str(column.header) for column in table.columns]


def test_an_engine_is_named_by_what_is_not_the_default():
    assert EngineKind().label == "baton"
    assert EngineKind(activations="int8", kv_dtype="fp8").label == (
        "baton (activations int8, kv dtype fp8)"
    )


def test_works_can_be_chosen_by_how_they_begin():
    assert chosen(WORKS, None) == WORKS
    assert [work.label for work in chosen(WORKS, ["prefill 2,048", "decode"])] == [
        "prefill 2,048",
        *(f"decode {batch} at 512" for batch in (1, 8, 32)),
    ]
    assert [work.batch for work in chosen(WORKS, ["decode 8"])] == [8]
    with pytest.raises(BatonError, match=r'--only .* "prefill 512"'):
        chosen(WORKS, ["decode 3"])
