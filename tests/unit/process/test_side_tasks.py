"""Work beside the requests starts again when it fails, unless another run would fail as well."""

from __future__ import annotations

import pytest

from process import side_tasks
from process.side_tasks import keep_running
from protocol.errors import ConfigError


async def test_work_that_fails_starts_again(monkeypatch, caplog) -> None:
    monkeypatch.setattr(side_tasks, "RESTART_S", 0.0)
    failures = [ValueError("garbage"), KeyError("request_id"), None]

    async def run() -> None:
        failure = failures.pop(0)
        if failure is not None:
            raise failure

    await keep_running("telling other routers", run)
    assert failures == []
    assert "telling other routers failed" in caplog.text


async def test_what_an_operator_got_wrong_ends_it() -> None:
    async def run() -> None:
        raise ConfigError("redis_url: the store refuses our password")

    with pytest.raises(ConfigError, match="password"):
        await keep_running("watching the fleet", run)
