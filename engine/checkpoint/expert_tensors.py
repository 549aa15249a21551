"""The names of a checkpoint's tensors, however a file stores them; imports no torch.

Files hold a tensor for each expert, by Qwen's names or Mixtral's, or one for all experts, as
transformers writes them since version 5 and GGUF files do. An expert's part of such a tensor is one
range of bytes, so it counts as a tensor of its own, by Qwen's name.

Tensors of a language model that is one part of several have a prefix, which is left out. Nemotron-H
calls its embedding, its last norm and all layers together otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_MIXTRAL = re.compile(r"(model\.layers\.\d+)\.block_sparse_moe\.(gate|experts\.\d+\.w[123])(\..+)")
_OF_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_STACKED = re.compile(
    r"(.+\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:(?:\.weight)?(_scale_inv)?)"
)
_STACKED_BIAS = re.compile(r"(.+\.experts)\.(\w+_proj)[._]bias")
_STACKED_BLOCKS = re.compile(r"(.+\.experts)\.(\w+_proj_(?:blocks|scales))")
_OF_TEXT = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(lm_head\.)?(.+)")
_NEMOTRON = re.compile(r"(?:backbone|model)\.(embeddings|norm_f)\.weight|backbone\.(.+)")
_OF_NEMOTRON = {"embeddings": "embed_tokens.weight", "norm_f": "norm.weight"}
_HALVES = ("gate_proj", "up_proj")
_MAX_STACKED = 4096


def one_by_one(name: str, shape: Sequence[int]) -> tuple[list[str], tuple[int, ...]]:
    """The names of the tensors that the stored one consists of, in equal parts of its bytes, and
    the shape of each. That is the tensor itself, by its usual name, or the tensors of its experts.

    A tensor of all experts is [experts, outputs, inputs]; the outputs of `gate_up_proj` are gate's,
    then up's. Scales of fp8 are stored alike, of blocks, or two for gate and up of an expert. Each
    part of gpt-oss's biases, blocks and scales belongs to one expert.
    """
    name = _of_text(name)
    parts = _parts_of_gpt_oss(name, shape)
    if parts is not None:
        return parts, tuple(shape[1:])
    stacked = _STACKED.fullmatch(name)
    if stacked is None or len(shape) != 3 or not 1 <= shape[0] <= _MAX_STACKED:
        return [_usual(name)], tuple(shape)
    experts, outputs, inputs = shape
    halves = _HALVES if stacked[2] == "gate_up_proj" else (stacked[2],)
    if outputs % len(halves):
        return [name], tuple(shape)
    suffix = f".weight{stacked[3] or ''}"
    names = [f"{stacked[1]}.{e}.{half}{suffix}" for e in range(experts) for half in halves]
    return names, (outputs // len(halves), inputs)


def _parts_of_gpt_oss(name: str, shape: Sequence[int]) -> list[str] | None:
    """The experts' names; None for another tensor."""
    if len(shape) < 2 or not 1 <= shape[0] <= _MAX_STACKED:
        return None
    if bias := _STACKED_BIAS.fullmatch(name):
        return [f"{bias[1]}.{e}.{bias[2]}.bias" for e in range(shape[0])]
    if blocks := _STACKED_BLOCKS.fullmatch(name):
        return [f"{blocks[1]}.{e}.{blocks[2]}" for e in range(shape[0])]
    return None


def _of_text(name: str) -> str:
    """The name in a checkpoint of the language model alone."""
    if nemotron := _NEMOTRON.fullmatch(name):
        return f"model.{nemotron[2] or _OF_NEMOTRON[nemotron[1]]}"
    match = _OF_TEXT.fullmatch(name)
    return name if match is None else f"{match[1] or 'model.'}{match[2]}"


def _usual(name: str) -> str:
    """Qwen's name for a tensor if `name` is Mixtral's, otherwise `name`."""
    mixtral = _MIXTRAL.fullmatch(name)
    if mixtral is None:
        return name
    layer, part, rest = mixtral.groups()
    expert, _, old = part.rpartition(".")
    return (
        f"{layer}.mlp.{expert}.{_OF_MIXTRAL[old]}{rest}" if expert else f"{layer}.mlp.{part}{rest}"
    )
