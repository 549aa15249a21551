"""Finding a checkpoint: a folder, a hub id, or one line that says why not."""

from __future__ import annotations

import errno
import os
from fnmatch import fnmatch

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from checkpoint.model_source import (
    BUNDLED,
    HUB_PATTERNS,
    TEXT_PATTERNS,
    model_name,
    resolve_model,
)
from protocol.errors import ConfigError, ModelLoadError


def no_download(*args, **options):
    raise AssertionError("nothing should be fetched")


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    assert resolve_model(tmp_path, download=no_download) == tmp_path
    assert resolve_model(str(tmp_path), download=no_download) == tmp_path


def test_the_bundled_model_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = resolve_model(BUNDLED, download=no_download)
    assert (found / "model.safetensors").is_file()
    assert model_name(BUNDLED) == BUNDLED
    with pytest.raises(ConfigError, match="revision 'v1' has no meaning for the local folder"):
        resolve_model(BUNDLED, "v1", no_download)
    (tmp_path / BUNDLED).mkdir()
    assert resolve_model(BUNDLED, download=no_download).resolve() == tmp_path / BUNDLED


def test_a_hub_id_is_fetched(tmp_path):
    asked = []

    def download(
        repo_id: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        asked.append((repo_id, revision, allow_patterns))
        return str(tmp_path)

    assert resolve_model("some-owner/Some-Model_1.5", download=download) == tmp_path
    assert resolve_model("some-owner/Some-Model_1.5", "v1", download) == tmp_path
    patterns = list(HUB_PATTERNS)
    assert asked == [("some-owner/Some-Model_1.5", each, patterns) for each in (None, "v1")]


def test_a_local_folder_has_no_revision(tmp_path):
    with pytest.raises(ConfigError, match="revision 'v1' has no meaning for the local folder"):
        resolve_model(tmp_path, "v1", no_download)


def test_a_router_fetches_no_weights(tmp_path):
    files = ["config.json", "tokenizer.json", "chat_template.jinja", "model-1-of-2.safetensors"]

    def download(
        repo_id: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        kept = [name for name in files if any(fnmatch(name, each) for each in allow_patterns)]
        assert kept == files[:-1]
        return str(tmp_path)

    assert resolve_model("owner/name", None, download, TEXT_PATTERNS) == tmp_path


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
    def download(repo_id: str, **options) -> str:
        raise error

    with pytest.raises(ModelLoadError) as raised:
        resolve_model("some-owner/some-model", download=download)
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
        resolve_model(name, download=no_download)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_to_is_named(code):
    def download(repo_id: str, **options) -> str:
        raise OSError(code, os.strerror(code), "/cache/hub")

    with pytest.raises(ModelLoadError, match="HF_HOME") as raised:
        resolve_model("some-owner/some-model", download=download)
    assert "network" not in str(raised.value)
    assert os.strerror(code) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("~nobody-of-this-name/x", "there is no home folder of this name here"),
        ("a" * 300 + "/b/c", "File name too long"),
        ("loop/model/x", "Too many levels of symbolic links"),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_one_line(name, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ModelLoadError, match=reason):
        resolve_model(name, download=no_download)


def test_a_long_hub_id_is_still_one(tmp_path):
    name = "owner/" + "n" * 300
    assert resolve_model(name, download=lambda repo_id, **options: str(tmp_path)) == tmp_path


def test_a_file_is_not_a_model(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model(file, download=no_download)


def test_a_checkpoint_is_served_under_its_folder_or_hub_id(tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    assert model_name(str(folder) + "/") == "some-model"
    assert model_name("some-owner/some-model") == "some-owner/some-model"
