"""A store, a router and a worker, with a checkpoint of the gateway's tests."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from process.store.embedded_valkey import EmbeddedValkey
from tests.forked import KNOWN_CHECKPOINT
from tests.unit.gateway.conftest import checkpoint
from tests.unit.router.fake_worker import SECRET, WAIT_S, FakeWorker
from tests.unit.router_process.running_router import RouterProcess, fork, registered

__all__ = ["checkpoint"]


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as running:
        yield running


@pytest.fixture
def cluster() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
async def router(
    valkey: EmbeddedValkey,
    checkpoint: Path,
    tmp_path: Path,
    cluster: str,
    request: pytest.FixtureRequest,
) -> AsyncIterator[RouterProcess]:
    """A router on a free port, in a cluster of its test's own; parametrised by its flags."""
    log, port_file = tmp_path / "log", tmp_path / "port"
    process = fork(
        log,
        f"--model={checkpoint}",
        "--port=0",
        f"--port-file={port_file}",
        f"--cluster={cluster}",
        *getattr(request, "param", ["--shutdown-grace-s=20"]),
        BATON_REDIS_URL=valkey.url,
        BATON_CLUSTER_SECRET=SECRET,
        **{KNOWN_CHECKPOINT: str(checkpoint)},
    )
    async with asyncio.timeout(WAIT_S):
        while not port_file.exists():
            assert process.is_running(), log.read_text()
            await asyncio.sleep(0.02)
    url = f"http://127.0.0.1:{int(port_file.read_text())}"
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        running = RouterProcess(process, client, log)
        yield running
        await running.stop()
    assert f"listening on {url}" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.fixture
async def worker(valkey: EmbeddedValkey, cluster: str) -> AsyncIterator[FakeWorker]:
    """The first decode worker."""
    async with registered(valkey, cluster, worker_id="d1", max_context=123) as made:
        yield made
