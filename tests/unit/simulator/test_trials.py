"""Simulations of a search: each is remembered at once, and all have the trace of the beginning."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.progress import Progress

from simulator.commands.fleets import Size
from simulator.commands.runs import Run, processes_with_trace, simulate, trace_of
from simulator.commands.settings import SimulationSettings
from simulator.commands.trials import Trials, fingerprint
from simulator.planning.ledger import Ledger
from simulator.planning.race import Trial
from tests.gguf_files import write_gguf
from tests.paths import DEMO_MODEL

ROW = {"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [0]}


class WatchedLedger(Ledger[Trial]):
    """Says when it has a result."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Trial)
        self.has_one = threading.Event()

    def add(self, key: str, result: Trial) -> None:
        super().add(key, result)
        self.has_one.set()


def test_a_finished_simulation_does_not_wait_for_a_slow_one(tmp_path: Path) -> None:
    path = tmp_path / "trials"
    ledger = WatchedLedger(path)

    def tries(job: str) -> Trial:
        if job == "slow":
            assert ledger.has_one.wait(60)
            assert "quick" in path.read_text()
        return Trial(True, good_per_s=len(job))

    with ThreadPoolExecutor(2) as pool, Progress(disable=True) as progress:
        trials = Trials(tries, str, ledger, pool, progress)
        found = trials.run(["slow", "quick", "slow"])
        assert [each.good_per_s for each in found] == [4, 5, 4], "in the order of the jobs"
        ledger.has_one.clear()
        assert trials.run(["quick", "slow"]) == [found[1], found[0]], "nothing is tried twice"
    assert len(path.read_text().splitlines()) == 2


def test_all_processes_have_the_trace_that_the_command_has_read(tmp_path: Path) -> None:
    path = tmp_path / "growing.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n" * 3)
    settings = SimulationSettings(trace=str(path), model="Llama-3-8B")
    assert trace_of(settings).num_turns == 3
    with processes_with_trace(settings, 1) as pool:
        path.unlink()
        found = pool.submit(simulate, settings, Run("one", Size(0, 1), "baton")).result()
    assert found.summary.num_served == 3


def test_a_result_is_known_by_all_files_that_it_depends_on(tmp_path: Path) -> None:
    names = {"trace": "trace.jsonl", "model": "config.json", "gpu": "gpu.json"}
    for name in names.values():
        (tmp_path / name).write_text("{}")
    settings = SimulationSettings(
        trace=str(tmp_path / "trace.jsonl"), model=str(tmp_path), gpu=str(tmp_path / "gpu.json")
    )
    seen = {fingerprint(settings, [])}
    for name in names.values():
        (tmp_path / name).write_text('{"another": 1}')
        seen.add(fingerprint(settings, []))
        os.utime(tmp_path / name, ns=(0, 0))
        seen.add(fingerprint(settings, []))
    assert len(seen) == 7
    assert fingerprint(settings, []) in seen


def test_a_result_is_known_by_the_gguf_file_in_the_folder_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "ours"
    folder.mkdir()
    seen = set[str]()
    for kind in ("Q8_0", "F16"):
        write_gguf(folder / "demo.gguf", DEMO_MODEL, "qwen3", kind=kind)
        for model in (folder, folder / "demo.gguf"):
            seen.add(fingerprint(SimulationSettings(trace="poisson:", model=str(model)), []))
    assert len(seen) == 2, "both names stand for the same model"


def test_a_result_is_not_that_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimulationSettings(trace="poisson:", model="Llama-3-8B")
    before = fingerprint(settings, [])
    monkeypatch.setattr("simulator.commands.trials.baton_version", lambda: "another")
    assert fingerprint(settings, []) != before
