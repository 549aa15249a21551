"""Reads and checks a checkpoint's generation_config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from checkpoint.json_keys import JsonKeys, read_json_object
from checkpoint.regular_file import is_there
from protocol.sampling import MIN_REPETITION_PENALTY

_JUST_BELOW_ZERO = -1e-9


@dataclass(frozen=True)
class GenerationConfig:
    """The sampling parameters that a checkpoint recommends; None where it sets none."""

    eos_token_ids: tuple[int, ...] = ()
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def load_generation_config(folder: Path) -> GenerationConfig:
    """The settings in `folder`'s generation_config.json; all defaults if there is no such file.

    Raises ModelLoadError naming a malformed key.
    """
    path = folder / "generation_config.json"
    if not is_there(path):
        return GenerationConfig()
    keys = JsonKeys(read_json_object(path), str(path))
    return GenerationConfig(
        eos_token_ids=keys.token_ids("eos_token_id"),
        do_sample=keys.flag("do_sample", False) if "do_sample" in keys else None,
        temperature=keys.number("temperature", None, above=_JUST_BELOW_ZERO, maximum=100.0),
        top_k=keys.integer("top_k", None, minimum=-1),
        top_p=keys.number("top_p", None, maximum=1.0),
        min_p=keys.number("min_p", None, above=_JUST_BELOW_ZERO, maximum=1.0),
        repetition_penalty=keys.number(
            "repetition_penalty", None, above=MIN_REPETITION_PENALTY, maximum=100.0
        ),
    )
