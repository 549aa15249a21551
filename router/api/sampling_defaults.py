"""Sampling defaults from a checkpoint's `generation_config.json`.

Also collects the ids that end a text, which checkpoints scatter over three files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import ModelLoadError
from router.text.checkpoint_files import read_json


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling of a request without sampling fields; neutral unless the checkpoint sets a value."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    end_token_ids: tuple[int, ...] = ()


def load_sampling_defaults(path: Path, eos_id: int | None) -> SamplingDefaults:
    """Reads the files in the checkpoint's folder; `eos_id` is the tokenizer's end of text.

    Raises ModelLoadError, which names the file and the key.
    """
    file = path / "generation_config.json"
    generation = read_json(file, required=False)
    model = read_json(path / "config.json", required=False)
    ends = [] if eos_id is None else [eos_id]
    for source in (generation, model):
        ends += _token_ids(source.get("eos_token_id"), path)
    return SamplingDefaults(
        temperature=_number(generation, "temperature", 1.0, file),
        top_p=_number(generation, "top_p", 1.0, file),
        top_k=max(0, int(_number(generation, "top_k", 0, file))),
        min_p=_number(generation, "min_p", 0.0, file),
        repetition_penalty=_number(generation, "repetition_penalty", 1.0, file),
        end_token_ids=tuple(sorted(set(ends))),
    )


def _number(values: dict[str, Any], key: str, default: float, file: Path) -> float:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelLoadError(f"{file}: {key} must be a number, not {value!r}")
    return value


def _token_ids(value: Any, path: Path) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(id_, bool) or not isinstance(id_, int) for id_ in ids):
        raise ModelLoadError(f"{path}: eos_token_id must be a token id or a list, not {value!r}")
    return ids
