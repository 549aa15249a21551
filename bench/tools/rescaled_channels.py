"""Writes a checkpoint's function with other weights: channels are multiplied by random factors, and
the weights that read them divided by the same ones.

    python -m bench.tools.rescaled_channels FOLDER TARGET

A model that was made from weights in few bits has no block on their grid afterwards, so what
rounding costs it can be measured. For Llama's tensors in one file, without biases.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_SEED = 5
_OCTAVES = 0.5
"""Factors lie between 2 to the power of minus this and 2 to the power of this."""

Tensors = dict[str, torch.Tensor]


def rescaled(tensors: Tensors, num_kv_heads: int) -> Tensors:
    """The tensors of a model that computes the same, up to rounding, in fp32. Logits have weights
    of their own."""
    found = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
    found.setdefault("lm_head.weight", found["model.embed_tokens.weight"].clone())
    generator = torch.Generator().manual_seed(_SEED)

    def factors(count: int) -> torch.Tensor:
        return ((torch.rand(count, generator=generator) * 2 - 1) * _OCTAVES).exp2()

    def rescale(written: str, read: list[str]) -> None:
        """The channels that the rows, or the numbers, of `written` make and columns of `read`
        take."""
        by = factors(len(found[written]))
        found[written] *= by if found[written].dim() == 1 else by[:, None]
        for name in read:
            repeats = found[name].shape[1] // len(by)  # query heads that share one of values
            heads = by.unflatten(0, (num_kv_heads, -1)) if repeats > 1 else by[None]
            found[name] /= heads.repeat_interleave(repeats, dim=0).flatten()

    num_layers = sum(name.endswith(".input_layernorm.weight") for name in found)
    for layer in (f"model.layers.{number}." for number in range(num_layers)):
        attention, feed_forward = f"{layer}self_attn.", f"{layer}mlp."
        qkv = [f"{attention}{each}_proj.weight" for each in "qkv"]
        gate_up = [f"{feed_forward}{each}_proj.weight" for each in ("gate", "up")]
        rescale(f"{layer}input_layernorm.weight", qkv)
        rescale(qkv[2], [f"{attention}o_proj.weight"])
        rescale(f"{layer}post_attention_layernorm.weight", gate_up)
        rescale(gate_up[1], [f"{feed_forward}down_proj.weight"])
    rescale("model.norm.weight", ["lm_head.weight"])
    return found


def write_rescaled(folder: Path, target: Path) -> None:
    """Write the checkpoint in `folder` to `target`, rescaled, in bf16."""
    config = json.loads((folder / _CONFIG).read_text())
    found = rescaled(load_file(folder / _WEIGHTS), config["num_key_value_heads"])
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(_WEIGHTS, _CONFIG))
    (target / _CONFIG).write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2))
    weights = {name: each.bfloat16() for name, each in found.items()}
    save_file(weights, target / _WEIGHTS, {"format": "pt"})


if __name__ == "__main__":
    write_rescaled(*map(Path, sys.argv[1:3]))
