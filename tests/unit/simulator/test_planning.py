"""The search for the best fleet: candidates, rounds of equal load, trials that are remembered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from protocol.errors import ConfigError
from simulator.commands.fleets import Devices
from simulator.commands.settings import PlanSettings
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
    """A candidate that carried this load and failed at the next one, a tenth higher."""
    found = Standing(Candidate(prefill, 2, 1, chunk))
    if speed:
        found.note(speed, Trial(True))
        found.note(speed * 1.1, Trial(False))
    return found


@pytest.mark.parametrize(
    ("standings", "words"),
    [
        (
            [standing(0, 2.0), standing(1, 1.6)],
            ["Do not split: 2 colocated", "14% to 38% more than the best that splits (1 prefill"],
        ),
        (
            [standing(1, 3.0), standing(1, 2.0, 8192), standing(0, 1.0)],
            [
                "Split: 1 prefill",
                "173% to 230% more than the best that does not split",
                "36% to 65% more than the runner-up (1 prefill",
            ],
        ),
        (
            [standing(0, 2.2), standing(1, 2.0)],
            ["Do not split: 2 colocated", "0% to 21% more than the best that splits"],
        ),
        ([standing(0, 2.0), standing(1, 0.0)], ["no fleet that splits meets the targets"]),
        ([standing(0, 2.0)], ["Do not split: ", "no fleet that splits can be made of these GPUs"]),
        (
            [standing(1, 2.1), standing(0, 2.0)],
            ["Do not split: 2 colocated", "as much, as far as this search can tell, as the best"],
        ),
        ([standing(0, 0.0)], ["No fleet of this many GPUs meets the targets"]),
    ],
)
def test_the_verdict(standings: list[Standing], words: list[str]) -> None:
    assert all(each in verdict(standings) for each in words)


def test_fleets_that_carry_every_load_leave_it_undecided() -> None:
    both = [Standing(Candidate(prefill, 2, 1, 512)) for prefill in (0, 1)]
    for each in both:
        each.note(64.0, Trial(True))
    assert verdict(both).startswith("Undecided: 2 colocated")
    assert "too short" in verdict(both)


@pytest.mark.parametrize(
    ("misses", "words"),
    [
        ({"--tpot-ms": 7, "--ttft-ms": 2}, "most requests that are not good miss --tpot-ms."),
        ({"PromptTooLong": 3}, "are longer than a worker's context or KV pool."),
        ({"Overloaded": 3}, "are refused because of overload."),
        ({"TargetUnreachable": 3}, "are refused because they would be late."),
    ],
)
def test_the_verdict_says_what_no_fleet_can_meet(misses: dict[str, int], words: str) -> None:
    found = Standing(Candidate(0, 2, 1, 512))
    found.note(1.0, Trial(False, misses={"--ttft-ms": 100}))
    found.note(1 / 64, Trial(False, misses=misses))
    assert verdict([found]).endswith(words)


def test_a_share_of_nine_tenths_lets_one_of_ten_be_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [0]}
    rows = [{**row, "timestamp": 9000 * n} for n in range(9)]
    rows.append({**row, "timestamp": 90_000, "output_length": 1 << 20})
    path = tmp_path / "ten.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    arguments = [
        "plan",
        "--model",
        "Llama-3-8B",
        "--trace",
        str(path),
        "--gpus",
        "1",
        "--jobs",
        "1",
    ]
    arguments += ["--tp", "1", "--chunks", "512", "--rounds", "0", "--json"]
    assert main(arguments) == 0
    best = json.loads(capsys.readouterr().out)["ranking"][0]
    assert best["trial"]["good_share"] == 0.9
    assert main([*arguments, "--good-share", "0.91"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranking"][0]["trial"] is None
    assert found["verdict"].endswith("are longer than a worker's context or KV pool.")


def test_a_file_of_something_else_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for text in ('{"timestamp": 0}\n', "my notes", '{"key": "a", "requests": [1], "good": [1]}\n'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="holds something else"):
            Ledger(path, Trial)
        assert path.read_text() == text


def test_a_worker_has_as_many_gpus_as_the_heads_allow(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["plan", "--model", "OPT-13B", "--trace", "poisson:", "--gpus", "9"]
    assert main([*wanted, "--tp", "3"]) == 2
    err = capsys.readouterr().err
    assert err == "baton plan: --tp 3: num_attention_heads 40 cannot be split over 3 ranks\n"
    devices = Devices(PlanSettings(trace="", model="OPT-13B", gpus=8))
    assert [tp for tp in (1, 2, 3, 8, 16) if devices.can_split(tp)] == [1, 2, 8]


def test_a_plan_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trials"
    arguments = [*PLAN, "--resume", str(path), "--json", "--jobs", "1"]
    assert main(arguments) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["verdict"].startswith(("Split", "Do not split", "Undecided"))
    assert whole["ranking"][0]["trial"]["good_share"] >= 0.9
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == whole
    assert sorted(path.read_text().splitlines()) == sorted(lines), "nothing is tried twice"


def test_a_plan_that_cannot_be_made_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["plan", "--model", "Llama-3-70B", "--trace", "poisson:", "--gpus", "2"]
    assert main([*wanted, "--gpu", "L40S"]) == 2
    assert capsys.readouterr().err == "baton plan: --gpus 2: a worker of Llama-3-70B needs 4 GPUs\n"
