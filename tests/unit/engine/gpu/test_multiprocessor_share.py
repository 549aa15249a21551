"""A process's share of a card is what CUDA is told, and where it cannot be had that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.gpu.multiprocessor_share import limit_to_share
from protocol.errors import ConfigError

SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """That of a process beside an MPS daemon."""
    (tmp_path / "control").touch()
    return {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}


@pytest.mark.parametrize(("fraction", "share"), [(0.3, "30"), (1.0, "100"), (0.125, "12.5")])
def test_cuda_is_told_the_percentage(
    environment: dict[str, str], fraction: float, share: str
) -> None:
    limit_to_share(fraction, environment)
    assert environment[SHARE] == share
    limit_to_share(fraction, environment)


def test_without_a_daemon_it_says_what_to_do(tmp_path: Path) -> None:
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    with pytest.raises(ConfigError, match="start nvidia-cuda-mps-control -d"):
        limit_to_share(0.5, environment)
    assert SHARE not in environment


def test_a_share_that_the_environment_already_has_must_be_the_same(
    environment: dict[str, str],
) -> None:
    environment[SHARE] = "40"
    with pytest.raises(ConfigError, match="says, 40"):
        limit_to_share(0.5, environment)
