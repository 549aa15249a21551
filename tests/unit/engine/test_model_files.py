"""Finding a checkpoint, and its fingerprint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from engine.model_files import HUB_PATTERNS, model_fingerprint, read_tensor_entries, resolve_model
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


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_the_fingerprint_depends_on_content_alone(make_tiny, tmp_path, shard_bytes):
    folder = make_tiny(shard_bytes=shard_bytes).folder
    first = model_fingerprint(folder)
    assert len(first) == 32
    assert int(first, 16) >= 0
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    (copy / "README.md").write_text("unrelated")
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert model_fingerprint(copy) == first


def change_one_tensor(folder: Path, at: float) -> None:
    """Changes one byte of a tensor: its first, middle or last."""
    file = folder / "model.safetensors"
    tensor = read_tensor_entries(file)["model.layers.2.mlp.down_proj.weight"]
    content = bytearray(file.read_bytes())
    content[tensor.begin + int(at * (tensor.num_bytes - 1))] ^= 1
    file.write_bytes(content)


def change_config(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))


def rename_a_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"layers.0.mlp.up", b"layers.0.mlp.uq"))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: change_one_tensor(folder, 0.0),
        lambda folder: change_one_tensor(folder, 0.5),
        lambda folder: change_one_tensor(folder, 1.0),
        change_config,
        rename_a_tensor,
    ],
    ids=["first byte", "middle byte", "last byte", "config", "tensor name"],
)
def test_the_fingerprint_changes_with_the_model(make_tiny, change):
    folder = make_tiny().folder
    before = model_fingerprint(folder)
    change(folder)
    assert model_fingerprint(folder) != before


def test_no_fingerprint_without_config_or_weights(make_tiny):
    folder = make_tiny().folder
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        model_fingerprint(folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        model_fingerprint(folder)


def test_entries_tell_where_tensors_lie(make_tiny):
    tiny = make_tiny()
    entries = read_tensor_entries(tiny.folder / "model.safetensors")
    state = tiny.reference.state_dict()
    assert entries.keys() == state.keys()
    content = (tiny.folder / "model.safetensors").read_bytes()
    entry = entries["model.norm.weight"]
    assert (entry.dtype, entry.shape) == ("F32", (48,))
    assert content[entry.begin : entry.end] == state["model.norm.weight"].numpy().tobytes()
