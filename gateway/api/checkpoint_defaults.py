"""Default sampling parameters, from a checkpoint's `generation_config.json`.

Also collects the ids that end a text, which checkpoints scatter over three files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from checkpoint.generation_config import load_generation_config
from gateway.text.checkpoint_texts import model_keys

_END = "eos_token_id"


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
    generation = load_generation_config(path)
    ends = [] if eos_id is None else [eos_id]
    ends += [*generation.eos_token_ids, *model_keys(path).token_ids(_END)]
    return SamplingDefaults(
        temperature=_or(generation.temperature, 1.0),
        top_p=_or(generation.top_p, 1.0),
        top_k=max(0, generation.top_k or 0),  # -1, too, means all
        min_p=_or(generation.min_p, 0.0),
        repetition_penalty=_or(generation.repetition_penalty, 1.0),
        end_token_ids=tuple(sorted(set(ends))),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
