"""Defaults of a step's size by role and device, and what the settings say instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode_worker.settings import DecodeSettings
from prefill_worker.settings import PrefillSettings
from worker.settings import WorkerSettings
from worker.startup.step_limits import (
    StepLimits,
    card_bytes,
    goes_ahead,
    prefill_steps_ahead,
    step_limits,
)

GIB = 1 << 30
REQUIRED = {"model": "m", "redis_url": "redis://x", "cluster_secret": "a secret of sixteen"}


def limits(role: type[WorkerSettings], memory: int | None, **fields: Any) -> StepLimits:
    return step_limits(role(**REQUIRED, **fields), memory)


@pytest.mark.parametrize("role", [PrefillSettings, DecodeSettings])
def test_a_cpu_has_small_steps(role: type[WorkerSettings]) -> None:
    assert limits(role, None) == StepLimits(64, 16, 512)


@pytest.mark.parametrize(
    ("role", "memory", "tokens"),
    [
        (PrefillSettings, 80 * GIB, 8192),
        (DecodeSettings, 80 * GIB, 2048),
        (PrefillSettings, 24 * GIB - 1, 23 * 256),
        (PrefillSettings, 6 * GIB, 2048),
        (DecodeSettings, 6 * GIB, 2048),
    ],
)
def test_a_card_has_large_steps_by_role_and_memory(
    role: type[WorkerSettings], memory: int, tokens: int
) -> None:
    assert limits(role, memory) == StepLimits(256, 16, tokens)


@pytest.mark.parametrize("memory", [None, 80 * GIB])
def test_what_is_set_holds_on_any_device(memory: int | None) -> None:
    found = limits(PrefillSettings, memory, max_batch_size=8, chunk_max_tokens=64)
    assert found == StepLimits(8, 16, 64)


def test_chunks_are_never_smaller_than_a_block_or_their_least() -> None:
    assert limits(DecodeSettings, None, block_size=1024) == StepLimits(64, 1024, 1024)
    assert limits(DecodeSettings, None, chunk_min_tokens=600) == StepLimits(64, 600, 600)
    assert limits(DecodeSettings, None, chunk_max_tokens=8, chunk_min_tokens=4, block_size=16) == (
        StepLimits(64, 16, 16)
    )


def test_a_cpu_has_no_card() -> None:
    assert card_bytes(torch.device("cpu")) is None


@pytest.mark.parametrize("role", [PrefillSettings, DecodeSettings])
@pytest.mark.parametrize(
    ("device", "how", "expected"),
    [
        ("cpu", "auto", False),
        ("cuda:0", "auto", True),
        ("cpu", "on", True),
        ("cuda:0", "off", False),
    ],
)
def test_a_worker_of_either_role_runs_one_step_ahead_on_a_card_or_as_it_is_told(
    role: type[WorkerSettings],
    device: str,
    how: str,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = role(**REQUIRED, device=device, one_step_ahead=how)
    assert goes_ahead(settings) is expected
    assert prefill_steps_ahead(settings) == (int(expected), 1)


@pytest.mark.parametrize(("how", "ahead"), [("auto", (2, 3)), ("on", (2, 3)), ("off", (0, 1))])
def test_a_prefill_worker_has_a_step_in_each_stage(how: str, ahead: tuple[int, int]) -> None:
    """A decode worker has one: what its next step needs is chosen in the last stage."""
    settings = PrefillSettings(**REQUIRED, device="cpu", one_step_ahead=how, pipeline_parallel=3)
    assert prefill_steps_ahead(settings) == ahead
    assert not goes_ahead(settings)
