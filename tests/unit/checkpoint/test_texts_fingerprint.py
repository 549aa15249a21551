"""What identifies a checkpoint between routers, which have no weights, and workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.texts_fingerprint import texts_fingerprint
from protocol.errors import ModelLoadError


def write(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content)
    return folder


def test_configuration_and_tokenizer_count_and_nothing_else(tmp_path: Path) -> None:
    same = {"config": "{}", "tokenizer": "[1]"}
    mine = texts_fingerprint(write(tmp_path / "a", **same))
    assert texts_fingerprint(write(tmp_path / "b", **same, tokenizer_config="{}")) == mine
    for number, other in enumerate(
        ({"tokenizer": "[2]"}, {"config": "{ }"}, {"config": "{}[", "tokenizer": "1]"})
    ):
        assert texts_fingerprint(write(tmp_path / str(number), **(same | other))) != mine


def test_without_a_tokenizer_there_is_none(tmp_path: Path) -> None:
    assert texts_fingerprint(write(tmp_path / "a", config="{}")) == ""


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        texts_fingerprint(write(tmp_path / "a", tokenizer="[1]"))
