"""A small checkpoint folder, and a server of the API over it, for tests of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.text.tokenizer import Tokenizer
from tests.unit.gateway.api_clients import write_tools_checkpoint
from tests.unit.gateway.api_harness import LiveApi, write_checkpoint
from tests.unit.gateway.served_http import Serve, Served


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer and a chat template; no weights."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Iterator[Tokenizer]:
    """The tokenizer of `checkpoint`."""
    loaded = Tokenizer(checkpoint)
    yield loaded
    loaded.close()


@pytest.fixture(scope="session")
def running_api(checkpoint: Path, tokenizer: Tokenizer) -> Iterator[LiveApi]:
    """A real server on a free port; tests use `api`."""
    with LiveApi(checkpoint, tokenizer) as live:
        yield live


@pytest.fixture
def api(running_api: LiveApi) -> Iterator[LiveApi]:
    """The server with a generator that says "Hello"; no generation may outlive the test."""
    running_api.reset()
    yield running_api
    running_api.generator.wait_idle()


@pytest.fixture(scope="session")
def tools_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`checkpoint` with a template that knows tools and thoughts."""
    return write_tools_checkpoint(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="session")
def tools_tokenizer(tools_checkpoint: Path) -> Iterator[Tokenizer]:
    """The tokenizer of `tools_checkpoint`."""
    loaded = Tokenizer(tools_checkpoint)
    yield loaded
    loaded.close()


@pytest.fixture(scope="session")
def tools_api(tools_checkpoint: Path, tools_tokenizer: Tokenizer) -> Iterator[LiveApi]:
    """A server whose model thinks and calls tools; where a module's `running_api` is this one, its
    tests use `api`."""
    with LiveApi(tools_checkpoint, tools_tokenizer) as live:
        yield live


@pytest.fixture
async def serve(checkpoint: Path, tokenizer: Tokenizer) -> AsyncIterator[Serve]:
    """Starts HTTP servers with the limits that a test names; stops them when it ends."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**limits) -> Served:
            served = Served(checkpoint, tokenizer, **limits)
            stack.callback(served.listener.close)
            stop = asyncio.Event()
            task = asyncio.create_task(served.server.serve_until(stop, served.listener))

            async def end() -> None:
                for client in served.clients:  # a failed test has left its own open
                    client.close()
                stop.set()
                await task

            stack.push_async_callback(end)
            await served.until(lambda: served.server.started)
            return served

        yield start
