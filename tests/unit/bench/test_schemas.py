"""`bench.schemas` counts what it says, over its own cases and over ones of either layout."""

from __future__ import annotations

import json
from pathlib import Path

from bench.schemas.__main__ import OWN_CASES, Judge, cases_in, main
from bench.tools.paths import DEMO_MODEL

ODD = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
REMOTE = {"$ref": "http://example.org/schema"}


def instances_of(*pairs: tuple[object, bool]) -> list[dict[str, object]]:
    return [{"description": "", "data": data, "valid": valid} for data, valid in pairs]


def write_cases(folder: Path) -> None:
    (folder / "deep" / "optional").mkdir(parents=True)
    suite = [
        {"description": "a", "schema": ODD, "tests": instances_of(([1], True), ([1, 1], False))},
        {"description": "b", "schema": REMOTE, "tests": instances_of((1, True))},
    ]
    (folder / "deep" / "suite.json").write_text(json.dumps(suite))
    mask = {
        "schema": {"type": "integer"},
        "tests": instances_of((1, True), ("x", False), (2, False)),
    }
    (folder / "mask.json").write_text(json.dumps(mask))
    (folder / "deep" / "optional" / "skipped.json").write_text(json.dumps(suite))
    (folder / "other.json").write_text("[1]")


def judged(folder: Path, strict: bool) -> Judge:
    judge = Judge(DEMO_MODEL, strict)
    for case in cases_in(folder):
        judge.take(case)
    return judge


def test_both_layouts_are_counted(tmp_path: Path, capsys) -> None:
    write_cases(tmp_path)
    tally = judged(tmp_path, strict=False).tally
    assert (tally.schemas, tally.whole, tally.weakened) == (3, 1, 1)
    assert sum(tally.refused.values()) == 1
    assert (tally.right_accepts, tally.right_rejects, tally.announced_accepts) == (2, 1, 1)
    assert len(tally.wrong_accepts) == 1, "the tests of this schema are wrong on purpose"
    assert main([str(tmp_path), "--list"]) == 1
    assert "wrongly accepted: mask.json: : 2" in capsys.readouterr().out
    strict = judged(tmp_path, strict=True).tally
    assert (strict.whole, strict.weakened, sum(strict.refused.values())) == (1, 0, 2)


def test_of_its_own_cases_none_is_accepted_wrongly(tmp_path: Path) -> None:
    lax, strict = judged(OWN_CASES, strict=False).tally, judged(OWN_CASES, strict=True).tally
    for tally in (lax, strict):
        assert tally.schemas == 50
        assert tally.wrong_accepts == tally.wrong_rejects == []
    assert not lax.refused
    assert lax.weakened == sum(strict.refused.values()) == 6
    assert strict.announced_accepts == 0
    assert main([str(tmp_path)]) == 2
