"""Every kind of tensor of every family: what is missing, has a wrong shape or an unknown type is
named in one line, before any tensor is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.model_source import resolve_model
from engine.checkpoint.config import load_model_config
from engine.checkpoint.gguf_names import llama_cpp_name
from engine.checkpoint.stored_tensors import FileTensors
from engine.checkpoint.weights import load_weights
from protocol.errors import ModelLoadError
from tests.gguf_families import FAMILIES as GGUF_FAMILIES
from tests.gguf_families import write_family
from tests.hybrid_models import HYBRIDS
from tests.latent_models import LATENT_MODELS
from tests.unit.engine.test_served_tokens import MODELS

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name in (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "SeedOssForCausalLM",
        "Ministral3ForCausalLM",
    )
}
FAMILIES = DENSE | MODELS | LATENT_MODELS | HYBRIDS


class Headers(FileTensors):
    """Tensors of which only the headers may be read."""

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} is read")


def one_of_each_kind(tensors: FileTensors) -> Iterator[str]:
    """A tensor of each kind: names of one kind differ by numbers alone."""
    kinds: dict[str, str] = {}
    for name in tensors.entries:
        kinds.setdefault(re.sub(r"\d+", "N", name), name)
    yield from kinds.values()


def assert_wrong_tensors_are_named(folder: Path, where: str) -> None:
    """`where` is in each message: the folder or the file."""
    config = load_model_config(folder)
    usual = Headers(folder).entries
    for name in one_of_each_kind(Headers(folder)):
        entry = usual[name]
        for changed, message in (
            (None, "is missing"),
            (replace(entry, shape=(*entry.shape[:-1], entry.shape[-1] + 1)), "has the shape"),
            (replace(entry, dtype="I64"), "is stored as I64"),
        ):
            tensors = Headers(folder)
            tensors.entries = {**usual, name: changed or entry}
            if changed is None:
                del tensors.entries[name]
            with pytest.raises(ModelLoadError, match=message) as error:
                load_weights(tensors, config)
            line = str(error.value)
            assert "\n" not in line
            assert where in line
            assert any(repr(each) in line for each in names_of(name))


def names_of(name: str) -> set[str]:
    """The names that an error may give to a tensor: in GGUF files llama.cpp's, and of gpt-oss's
    tensors for gate and up those of a half."""
    halves = {name.replace("gate_up_proj", f"{half}_proj") for half in ("gate", "up")}
    return {name, llama_cpp_name(name), *halves}


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_tensors_of_safetensors_are_named(make_tiny: Any, family: str) -> None:
    architecture, options = FAMILIES[family]
    folder = make_tiny(architecture, **options).folder
    assert_wrong_tensors_are_named(folder, str(folder))


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_wrong_tensors_of_gguf_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_family(tmp_path, family, "F32")
    assert_wrong_tensors_are_named(resolve_model(file), file.name)
