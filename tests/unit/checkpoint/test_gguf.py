"""GGUF files: which one a name means, and where what was read of it is kept."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest

from bench.tools.gguf_conversion import finish
from checkpoint.gguf.folder import split_files
from checkpoint.model_source import model_name, resolve_model
from protocol.errors import ConfigError, ModelLoadError
from tests.gguf_files import TOKENS, smollm2, write_metadata
from tests.unit.checkpoint.gguf_models import CONFIG, U32, write

# -- which file a name means ------------------------------------------------------------------


def test_a_file_and_the_folder_that_holds_it_are_the_same_model(tmp_path):
    (tmp_path / "some").mkdir()
    file = write(tmp_path / "some" / "Tiny.Q8_0.gguf")
    folder = resolve_model(file)
    assert resolve_model(file.parent) == folder
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
    assert (folder / "model-00001-of-00001.gguf").resolve() == file.resolve()
    assert resolve_model(folder) == folder
    assert model_name(str(file)) == "Tiny.Q8_0"


def test_a_changed_file_is_read_again(tmp_path):
    file = write(tmp_path / "m.gguf")
    before = resolve_model(file)
    assert resolve_model(file) == before
    file.unlink()
    write(file, llama__attention__sliding_window=(16, U32))
    after = resolve_model(file)
    assert after != before
    assert json.loads((after / "config.json").read_text())["sliding_window"] == 16


def test_a_folder_with_several_models_needs_a_choice(tmp_path):
    (tmp_path / "models").mkdir()
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf", "mmproj-a.gguf"):
        write(tmp_path / "models" / name)
    with pytest.raises(ModelLoadError, match=r"several models.*a-Q4_0\.gguf, a-Q8_0\.gguf"):
        resolve_model(tmp_path / "models")


def split(folder: Path, count: int = 2) -> list[Path]:
    """A model in two files, as llama.cpp splits them."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=1)
    write_metadata(writer, "llama", CONFIG)
    writer.add_tensor("token_embd.weight", np.ones((len(TOKENS), 32), np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(32, np.float32))
    finish(writer)
    return sorted(folder.glob("m-*-of-*.gguf"))


def test_split_files_count_as_one(tmp_path):
    (tmp_path / "parts").mkdir()
    parts = split(tmp_path / "parts")
    assert [part.name for part in parts] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert split_files(parts[1]) == parts
    folder = resolve_model(parts[0])
    assert folder == resolve_model(parts[1]) == resolve_model(tmp_path / "parts")
    assert len(list(folder.glob("*.gguf"))) == 2
    assert model_name(str(parts[0])) == "m"
    parts[1].unlink()
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00002\.gguf is missing"):
        resolve_model(parts[0])


def test_parts_of_other_models_are_refused(tmp_path):
    (tmp_path / "parts").mkdir()
    parts = split(tmp_path / "parts")
    parts[1].unlink()
    write(parts[1])
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00002\.gguf.*split\.count"):
        resolve_model(parts[0])


def test_parts_in_another_order_are_refused(tmp_path):
    first, second = split(tmp_path)
    other = first.rename(tmp_path / "other")
    second.rename(first)
    other.rename(second)
    with pytest.raises(ModelLoadError, match=r"m-0000\d-of-00002\.gguf.*split\.no.*0, as its name"):
        resolve_model(first)


def test_a_cache_that_others_could_change_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = write(tmp_path / "m.gguf")
    cache = tmp_path / "cache" / "baton" / "gguf"
    assert resolve_model(file).parent == cache
    cache.chmod(0o777)
    assert resolve_model(file).parent == tmp_path / f"baton-gguf-{os.geteuid()}"
    (tmp_path / f"baton-gguf-{os.geteuid()}").chmod(0o777)
    with pytest.raises(ModelLoadError, match="XDG_CACHE_HOME"):
        resolve_model(file)


def test_a_hub_id_may_name_a_quantization(tmp_path):
    asked = []
    (tmp_path / "hub").mkdir()
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", "tiny-IQ4_K_M.gguf"):
        write(tmp_path / "hub" / name)

    def download(
        repo_id: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        asked.append((repo_id, revision, allow_patterns))
        return str(tmp_path / "hub")

    folder = resolve_model("org/tiny-GGUF:q4_k_m", "v1", download)
    assert asked == [("org/tiny-GGUF", "v1", ["*Q4_K_M*.gguf", "*q4_k_m*.gguf"])]
    assert (folder / "model-00001-of-00001.gguf").resolve().name == "tiny-Q4_K_M.gguf"
    with pytest.raises(ModelLoadError, match="no GGUF file whose name ends in Q2_K"):
        resolve_model("org/tiny-GGUF:Q2_K", None, download)
    assert model_name("org/tiny-GGUF:Q4_K_M") == "org/tiny-GGUF:Q4_K_M"


def test_a_local_file_has_no_revision(tmp_path):
    with pytest.raises(ConfigError, match="no meaning for the local file"):
        resolve_model(write(tmp_path / "m.gguf"), "v1")


def test_a_real_file_is_read(tmp_path):
    folder = resolve_model(smollm2())
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["vocab_size"]) == (30, 49152)
    assert config["dtype"] == "bfloat16"
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [2]}
