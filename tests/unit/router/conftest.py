"""A small checkpoint folder, and a server of the API over it, for the router's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.tokenizer import Tokenizer
from tests.unit.router.api_clients import write_tools_checkpoint
from tests.unit.router.api_harness import LiveApi, write_checkpoint


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
def tools_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApi]:
    """A server whose model thinks and calls tools; tests reset it."""
    path = write_tools_checkpoint(tmp_path_factory.mktemp("tools"))
    tokenizer = Tokenizer(path)
    with LiveApi(path, tokenizer) as live:
        yield live
    tokenizer.close()
