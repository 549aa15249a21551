"""The setting `record_trace`: where the recording goes, and what is refused at the start."""

from __future__ import annotations

import stat
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from router_process.parts import assemble
from router_process.settings import RouterSettings
from simulator.traces.files import TraceOptions, read_trace
from tests.unit.router.recording.test_recorder import ended, hashes


def settings(path: Path) -> RouterSettings:
    return RouterSettings(
        model="unused",
        redis_url="redis://unused",
        cluster_secret="a secret of a cluster",
        record_trace=str(path),
    )


async def test_a_router_records_until_it_stops(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    async with AsyncExitStack() as stack:
        parts = assemble(settings(path), stack)
        parts.dispatcher.on_end(ended(1, hashes(1, 2, 3, 4)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_trace(str(path), TraceOptions()).num_turns == 1


async def test_a_file_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"record_trace .*No such file or directory"):
            assemble(settings(tmp_path / "nowhere" / "trace"), stack)
