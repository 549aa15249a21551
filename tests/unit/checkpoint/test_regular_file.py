"""A file that Git LFS has not fetched is named as such, whatever it stands for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.gguf.header import read_header
from engine.checkpoint.config import load_model_config
from engine.checkpoint.files import read_tensor_entries
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ModelLoadError
from tests.paths import ROOT

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3941040\n"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", read_tensor_entries),
        ("model.gguf", read_header),
        ("config.json", lambda file: load_model_config(file.parent)),
        ("tokenizer.json", lambda file: Tokenizer(file.parent)),
    ],
)
def test_a_pointer_is_no_file(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    folder = shutil.copytree(ROOT / "demo_model", tmp_path / "model")
    (folder / name).write_text(POINTER)
    with pytest.raises(ModelLoadError) as refused:
        read(folder / name)
    assert f"{folder / name} is a pointer of Git LFS: fetch the file itself" in str(refused.value)
