"""The accuracy benchmark on the bundled model: fewer bits move the odds further."""

from __future__ import annotations

import math

import pytest
import torch

from bench.accuracy import Kind, compare, held_text, pick_device, report
from engine.native.library import KernelsUnavailable, load_library
from protocol.errors import BatonError
from tests.paths import DEMO_MODEL

FOLDER = DEMO_MODEL


def test_fewer_bits_move_the_odds_further():
    try:
        if not load_library().baton_has_linear():
            pytest.skip("this CPU has no bf16 products")
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    kinds = [Kind("auto"), Kind("int8"), Kind("int4"), Kind("auto", "fp8")]
    sums = compare(FOLDER, kinds, held_text(), num_tokens=1500)
    plain, eight, four, kv_eight = (sums[kind] for kind in kinds)
    assert {each.tokens for each in sums.values()} == {1500 - 3}
    assert plain.divergence == 0
    assert plain.agreeing == plain.tokens
    assert 0 < eight.divergence < four.divergence
    assert 0 < kv_eight.divergence < four.divergence
    assert plain.agreeing > eight.agreeing > four.agreeing
    assert math.isfinite(four.loss)
    assert report(sums).row_count == 4
    assert [kind.label for kind in kinds] == ["auto", "int8", "int4", "auto, KV fp8"]


def test_fp8_is_measured_on_a_card_with_what_a_card_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device([Kind("auto"), Kind("int8"), Kind("auto", "fp8")]).type == "cpu"
    with pytest.raises(BatonError, match="torch sees none"):
        pick_device([Kind("auto"), Kind("fp8")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device([Kind("auto"), Kind("fp8")]).type == "cuda"
    with pytest.raises(BatonError, match="int8"):
        pick_device([Kind("auto"), Kind("fp8"), Kind("int8")])
    with pytest.raises(BatonError, match="KV in fp8 is measured on a CPU"):
        pick_device([Kind("fp8"), Kind("auto", "fp8")])
