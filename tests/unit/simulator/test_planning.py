"""The search for the best fleet: candidates, rounds of equal load, trials that are remembered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from protocol.errors import ConfigError
from simulator.planning.candidates import Candidate, fleets
from simulator.planning.ledger import Ledger
from simulator.planning.race import Standing, Trial, race
from simulator.report.plan import verdict

PLAN = [
    "plan", "--model", "Llama-3-8B", "--trace", "poisson:requests=40,prompt=2000,output=40,rate=16",
    "--gpus", "2", "--tp", "1", "--chunks", "1024,4096", "--rounds", "1", "--num-blocks", "500",
    "--ttft-ms", "200",
]  # fmt: skip


def limits(**by_name: float) -> tuple[list[Candidate], Any, list[tuple[int, float]]]:
    """Candidates that pass up to a load, how to try them, and the trials that are made."""
    candidates = [Candidate(n, 1, 1, 512) for n in range(len(by_name))]
    most = dict(zip(candidates, by_name.values(), strict=True))
    made: list[tuple[int, float]] = []

    def tries(group: Sequence[Candidate], speed: float) -> list[Trial]:
        made.extend((each.prefill, speed) for each in group)
        return [Trial(speed <= most[each], good_per_s=speed) for each in group]

    return candidates, tries, made


@pytest.mark.parametrize("best", [0.07, 0.9, 1.0, 1.3, 37.0])
def test_the_best_is_found_closely_and_others_are_tried_less(best: float) -> None:
    candidates, tries, made = limits(a=best / 3, b=best, c=best / 2.1)
    standings = race(candidates, tries, rounds=6)
    assert standings[0].candidate.prefill == 1
    assert best / 1.02 <= standings[0].speed <= best
    assert best <= (standings[0].failed_at or 0) <= best * 1.02
    assert len([each for each in made if each[0] == 1]) > len([e for e in made if e[0] == 0])
    assert all(each.speed <= standings[0].speed for each in standings)


def test_nothing_that_never_passes_is_tried_for_ever() -> None:
    candidates, tries, made = limits(a=0.0)
    (standing,) = race(candidates, tries, rounds=5)
    assert standing.trial is None
    assert len(made) < 10


def test_a_trace_that_is_too_short_to_find_a_limit() -> None:
    candidates, tries, made = limits(a=1e9)
    standings = race(candidates, tries, rounds=5)
    assert standings[0].failed_at is None
    assert len(made) < 10
    assert "too short" in verdict(standings)


def test_equal_loads_rank_by_the_share_of_good_requests() -> None:
    one, other = (Standing(Candidate(n, 1, 1, 512)) for n in (1, 2))
    one.note(1.0, Trial(True, good_share=0.95))
    other.note(1.0, Trial(True, good_share=0.99))
    assert min(one, other, key=lambda each: each.rank) is other


def test_fleets_use_the_gpus() -> None:
    found = fleets(8, [1, 4], 2048)
    assert [each.prefill for each in found if each.tp == 4] == [0, 1]
    assert all((each.prefill + each.decode) * each.tp == 8 for each in found)
    assert len(fleets(512, [1], 2048)) == 9
    assert fleets(2, [4], 2048) == []


def test_trials_are_remembered_but_for_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "trials"
    ledger = Ledger(path, Trial)
    ledger.add("a", Trial(True, 1.5, 0.9, 100.0, 20.0))
    ledger.add("b", Trial(False))
    path.write_text(path.read_text()[:-7] + '\n[1]\n{"key": "c"}\n')
    again = Ledger(path, Trial)
    assert len(again) == 1
    assert again.find("a") == Trial(True, 1.5, 0.9, 100.0, 20.0)
    assert again.find("b") is None
    with pytest.raises(ConfigError, match="--resume"):
        Ledger(tmp_path / "none" / "trials", Trial).add("a", Trial(False))


def test_a_trial_after_a_line_that_was_cut_off_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "trials"
    path.write_text('{"key": "a", "pas')
    ledger = Ledger(path, Trial)
    ledger.add("b", Trial(False))
    ledger.add("c", Trial(True))
    again = Ledger(path, Trial)
    assert [again.find(each) for each in "abc"] == [None, Trial(False), Trial(True)]


def standing(prefill: int, speed: float, chunk: int = 512) -> Standing:
    found = Standing(Candidate(prefill, 2, 1, chunk))
    if speed:
        found.note(speed, Trial(True))
    return found


@pytest.mark.parametrize(
    ("standings", "words"),
    [
        (
            [standing(0, 2.0), standing(1, 1.6)],
            ["Do not split: 2 colocated", "25% more than the best that splits (1 prefill"],
        ),
        (
            [standing(1, 3.0), standing(1, 2.0, 8192), standing(0, 1.0)],
            [
                "Split: 1 prefill",
                "200% more than the best that does not split",
                "50% more than the",
            ],
        ),
        ([standing(0, 2.0), standing(1, 0.0)], ["no fleet that splits meets the targets"]),
        ([standing(0, 0.0)], ["No fleet of this many GPUs meets the targets"]),
    ],
)
def test_the_verdict(standings: list[Standing], words: list[str]) -> None:
    assert all(each in verdict(standings) for each in words)


def test_a_plan_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trials"
    arguments = [*PLAN, "--resume", str(path), "--json", "--jobs", "1"]
    assert main(arguments) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["verdict"].startswith(("Split", "Do not split"))
    assert whole["ranking"][0]["trial"]["good_share"] >= 0.9
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == whole
    assert sorted(path.read_text().splitlines()) == sorted(lines), "nothing is tried twice"


def test_a_plan_that_cannot_be_made_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["plan", "--model", "Llama-3-70B", "--trace", "poisson:", "--gpus", "2"]
    assert main([*wanted, "--gpu", "L40S"]) == 2
    assert capsys.readouterr().err == "baton plan: --gpus 2: a worker needs 4\n"
