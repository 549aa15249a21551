"""What a worker fetches of a model before it knows whose weights it will load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from worker.settings import WorkerSettings
from worker.startup.model_loading import fetched


@pytest.mark.parametrize(("weights_from", "has_weights"), [("checkpoint", True), ("peer", False)])
def test_weights_that_a_peer_may_send_are_not_fetched(
    weights_from: str, has_weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    settings = WorkerSettings(
        model="owner/name",
        revision="v1",
        redis_url="redis://127.0.0.1:1",
        cluster_secret="a secret of sixteen",
        weights_from=weights_from,
    )
    assert fetched(settings) == tmp_path
    (call,) = asked
    assert (call["name"], call["revision"]) == ("owner/name", "v1")
    assert ("*.safetensors" in call["allow_patterns"]) is has_weights
    assert "*.json" in call["allow_patterns"]
