"""The accuracy benchmark on the bundled model: fewer bits move the odds further."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.accuracy import compare, held_text, report
from engine.native.library import KernelsUnavailable, load_library

FOLDER = Path(__file__).parents[3] / "demo_model"


def test_fewer_bits_move_the_odds_further():
    try:
        if not load_library().baton_has_linear():
            pytest.skip("this CPU has no bf16 products")
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    sums = compare(FOLDER, ["auto", "int8", "int4"], held_text(), num_tokens=1500)
    plain, eight, four = (sums[kind] for kind in ("auto", "int8", "int4"))
    assert plain.tokens == eight.tokens == four.tokens == 1500 - 3
    assert plain.divergence == 0
    assert plain.agreeing == plain.tokens
    assert 0 < eight.divergence < four.divergence
    assert plain.agreeing > eight.agreeing > four.agreeing
    assert math.isfinite(four.loss)
    assert report(sums).row_count == 3
