"""Recorded real fleets (`record_fleets`): the doctor names the planted fault, and no other."""

from __future__ import annotations

import gzip

import msgspec
import pytest

from console.doctor.doctor import Examination, examine
from console.doctor.observation import MIN_REQUESTS, Observation
from tests.unit.console.doctor.record_fleets import FOLDER, RECIPES


def examined(name: str) -> Examination:
    with gzip.open(FOLDER / f"{name}.json.gz") as file:
        seen = msgspec.json.decode(file.read(), type=Observation)
    assert len(seen.requests) >= MIN_REQUESTS
    return examine(seen)


@pytest.mark.parametrize("name", RECIPES)
def test_the_planted_fault_is_named_and_no_other(name: str) -> None:
    found = examined(name)
    expected = RECIPES[name].expected.rule
    assert [each.rule for each in found.findings] == ([] if expected is None else [expected])
    assert not {each.rule for each in found.passed} & {expected}


def test_findings_name_the_worker_and_the_pool_at_fault() -> None:
    titles = {name: each.title for name in RECIPES for each in examined(name).findings}
    assert titles["slow_worker"] == "decode-1 is slower than the decode pool"
    assert titles["faults"] == "decode-1 keeps ending"
    assert titles["prefill_short"] == "Prefill is short"
    assert titles["decode_places"] == "Decode is short"


def test_every_recording_has_a_recipe() -> None:
    names = {path.name.removesuffix(".json.gz") for path in FOLDER.iterdir()}
    assert names == set(RECIPES)
