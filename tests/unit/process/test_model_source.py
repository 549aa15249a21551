"""Finding a checkpoint: a folder, a hub id, or one line that says why not."""

from __future__ import annotations

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from process.model_source import HUB_PATTERNS, model_name, resolve_model
from protocol.errors import ModelLoadError


def no_download(*args, **options):
    raise AssertionError("nothing should be fetched")


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    assert resolve_model(tmp_path, no_download) == tmp_path
    assert resolve_model(str(tmp_path), no_download) == tmp_path


def test_a_hub_id_is_fetched(tmp_path):
    asked = []

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(tmp_path)

    assert resolve_model("some-owner/Some-Model_1.5", download) == tmp_path
    assert asked == [("some-owner/Some-Model_1.5", list(HUB_PATTERNS))]


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("An error happened.\nCheck your connection."),
        OSError("no route"),
        ValueError("bad id"),
        ConnectionError(),
    ],
    ids=repr,
)
def test_an_unreachable_hub_is_one_line(error):
    def download(repo_id: str, allow_patterns: list[str]) -> str:
        raise error

    with pytest.raises(ModelLoadError) as raised:
        resolve_model("some-owner/some-model", download)
    message = str(raised.value)
    assert "\n" not in message
    for part in ("'some-owner/some-model'", "local folder", "network"):
        assert part in message


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "a/b/c", "", "../x", "a b"])
def test_what_can_be_neither_folder_nor_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "":
        name = str(tmp_path / "missing")
    with pytest.raises(ModelLoadError, match="no folder"):
        resolve_model(name, no_download)


def test_a_file_is_not_a_model(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model(file, no_download)


def test_a_checkpoint_is_served_under_its_folder_or_hub_id(tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    assert model_name(str(folder) + "/") == "some-model"
    assert model_name("some-owner/some-model") == "some-owner/some-model"
