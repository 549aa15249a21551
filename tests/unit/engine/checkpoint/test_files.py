"""The files of a checkpoint, and its fingerprint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from engine.checkpoint.files import model_fingerprint, read_tensor_entries
from protocol.errors import ModelLoadError


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
