"""Downloads of a revision, from a stand-in of the hub, by the real client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint.model_source import commit_of, resolve_model
from tests.paths import ROOT
from tests.unit.checkpoint.hub_server import COMMITS, hub

REPOSITORY = "some-owner/some-model"
FILES = {
    commit: {
        "config.json": name.encode(),
        "chat_template.jinja": b"x",
        "additional_chat_templates/tool_use.jinja": b"x",
        "tiktoken.model": b"x",
        "model-00001-of-00002.safetensors": b"x",
        "consolidated.safetensors": b"x",
        "original/model.safetensors": b"x",
        "metal/model.bin": b"x",
        "evil.py": b"x",
    }
    for name, commit in COMMITS.items()
}
FETCH = """
import logging, sys
from checkpoint.model_source import resolve_model
from protocol.errors import ModelLoadError
logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.getLogger("httpx").setLevel(logging.WARNING)
try:
    print(resolve_model(sys.argv[1], sys.argv[2] or None))
except ModelLoadError as error:
    print("refused:", error)
"""


def fetch(url: str, cache: Path, revision: str, **more: str) -> tuple[str, str]:
    """What a process prints and logs that fetches the revision; `more` variables."""
    ours = {name: each for name, each in os.environ.items() if not name.startswith("HF_")}
    environ = {
        **ours,
        "HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "*", **more,
    }  # fmt: skip
    command = [sys.executable, "-c", FETCH, REPOSITORY, revision]
    done = subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200
    )
    return done.stdout.strip(), done.stderr


def test_a_revision_is_fetched_and_its_commit_logged(tmp_path: Path) -> None:
    """Without the same weights in their authors' own form, as Mistral and gpt-oss have them."""
    with hub(REPOSITORY, FILES) as url:
        folder, log = fetch(url, tmp_path, "v1")
        assert f"{REPOSITORY} at revision v1 is commit {COMMITS['v1']}" in log
        assert Path(folder, "config.json").read_text() == "v1"
        assert sorted(each.name for each in Path(folder).rglob("*") if each.is_file()) == [
            "chat_template.jinja", "config.json", "model-00001-of-00002.safetensors",
            "tiktoken.model", "tool_use.jinja",
        ]  # fmt: skip
        main, log = fetch(url, tmp_path, "")
        assert f"at revision main is commit {COMMITS['main']}" in log
        assert Path(main, "config.json").read_text() == "main"
        refused, log = fetch(url, tmp_path, "no-such-tag")
    assert refused.startswith(f"refused: '{REPOSITORY}'")
    assert "at revision 'no-such-tag'" in refused
    assert "\n" not in refused
    again, _ = fetch(url, tmp_path, COMMITS["v1"], HF_HUB_OFFLINE="1")
    assert again == folder
    assert commit_of(folder) == COMMITS["v1"]
    assert resolve_model(folder) == Path(folder)


def test_a_repository_that_may_not_be_read_is_named_with_the_hub_s_reason(tmp_path: Path) -> None:
    reason = "Access to this model is restricted. Ask for access on its page."
    gated = 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": reason}, b""
    with hub(REPOSITORY, FILES, refusal=gated) as url:
        refused, _ = fetch(url, tmp_path, "")
    assert "(does it exist, and may the account of HF_TOKEN read it?): 403 Client Error" in refused
    assert reason in refused
    assert "\n" not in refused


def test_what_the_client_cannot_ask_for_is_one_line(tmp_path: Path) -> None:
    """The hub's client passes on the errors of its transport."""
    refused, log = fetch("hub.example", tmp_path, "")
    assert refused.startswith(f"refused: '{REPOSITORY}' is neither a local folder nor could it be")
    assert "\n" not in refused
    assert "Traceback" not in log


@pytest.mark.nightly
def test_a_download_that_breaks_off_is_one_line(tmp_path: Path) -> None:
    with hub(REPOSITORY, FILES, cut="chat_template.jinja") as url:
        refused, log = fetch(url, tmp_path, "")
    assert refused.startswith(f"refused: '{REPOSITORY}' is neither a local folder nor could it be")
    assert "\n" not in refused
    assert "Traceback" not in log


def test_other_folders_have_no_commit(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "v1").mkdir(parents=True)
    assert commit_of(tmp_path) is None
    assert commit_of(tmp_path / "snapshots" / "v1") is None
