"""Which servers a benchmark compares, with settings that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.engine.workloads import EngineNeeds
from bench.turns import contestants as parts
from bench.turns.contestants import contestants
from decode_worker.settings import DecodeSettings
from prefill_worker.settings import PrefillSettings
from process.settings.spec import specs_of
from protocol.errors import BatonError
from router_process.settings import RouterSettings

NEEDS = EngineNeeds(Path("demo_model"), "float32", 2, 4096, 8, 10_000, 1024, 512)
ARMS = [f"by {how}, {what}" for how in ("affinity", "load") for what in ("no fetching", "fetching")]


def test_there_are_a_colocated_worker_and_four_arms() -> None:
    found = list(contestants(NEEDS, None))
    assert [each.name for each in found] == ["colocated", *ARMS]
    assert all(bool(each.command) != bool(each.missing) for each in found)


def test_all_settings_exist() -> None:
    specs = [
        spec
        for kind in (RouterSettings, DecodeSettings, PrefillSettings)
        for spec in specs_of(kind).values()
    ]
    known = {spec.env_name: spec for spec in specs}
    for each in contestants(NEEDS, None):
        if each.command is None:
            continue
        for name, value in each.command.environment.items():
            choices = known[name].choices
            assert not choices or value in choices


def test_arms_without_fetching_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "FETCH", "no_such_setting")
    left_out = [each.name for each in contestants(NEEDS, None) if each.missing]
    assert left_out == [each for each in ARMS if each.endswith(", fetching")]


def test_a_peer_that_is_not_installed_is_an_error(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(BatonError, match="has no vllm"):
        list(contestants(NEEDS, str(python)))
