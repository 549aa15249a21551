"""Converts the benchmark's checkpoints to GGUF, for the peers that read nothing else, and for
measurements of quantized formats.

Matrices of Llama, Qwen3 and Qwen3-MoE; one tensor at a time. The file's vocabulary has a word for
each token id, whatever the checkpoint's own is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from protocol.errors import BatonError

BF16 = "BF16"
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OF_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_IN_FP32 = ("norm", "ffn_gate_inp")
"""Endings of tensors that GGUF files hold in fp32."""


def has_gguf(folder: Path) -> bool:
    """Whether the checkpoint in `folder` is a GGUF file's."""
    return any(folder.glob("model-00001-of-*.gguf"))


def write_gguf(folder: Path, target: Path, kind: str = BF16) -> None:
    """Write the checkpoint in `folder`, in safetensors and bf16, to `target` unless it is there,
    with matrices in the format `kind`. Raises BatonError for other checkpoints."""
    if target.exists():
        return
    weights = folder / "model.safetensors"
    if not weights.exists():
        raise BatonError(f"{weights} is missing; GGUF is made of one file only")
    config = json.loads((folder / "config.json").read_text())
    family = config["architectures"][0]
    if family not in _ARCHITECTURES:
        raise BatonError(f"{folder}: {family} is not converted to GGUF here")
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, _ARCHITECTURES[family], use_temp_file=True)
    _write_config(writer, config)
    _write_vocabulary(writer, config["vocab_size"])
    for name, bits in _tensors(weights, config):
        _write_tensor(writer, name, bits, gguf.GGMLQuantizationType[kind])
    finish(writer)
    partial.rename(target)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the metadata and tensors that the writer was given, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_dimensions(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the metadata that all families have, from a config.json."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope_theta(config))


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    write_dimensions(writer, config)
    head_dim = _head_dim(config)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope_theta(config: dict[str, Any]) -> float:
    """The base of the rotary embedding, where transformers 5 or 4 writes it."""
    found = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta")
    return float(found or 10_000.0)


def _write_vocabulary(writer: Any, vocab_size: int) -> None:
    """Byte-level BPE: readers want at least one merge."""
    pieces = ["a", "b", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*pieces, *(f"w{i}" for i in range(len(pieces), vocab_size))])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab_size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _tensors(path: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Names of GGUF, and bf16 bits as uint16. A layer's experts are stacked. Raises BatonError."""
    data = np.memmap(path, np.uint8, "r")
    size = int.from_bytes(bytes(data[:8]), "little")
    header = json.loads(bytes(data[8 : 8 + size]))
    header.pop("__metadata__", None)
    _refuse_other_tensors(path, header)

    def read(name: str) -> np.ndarray:
        entry = header[name]
        begin, end = entry["data_offsets"]
        return data[8 + size + begin : 8 + size + end].view(np.uint16).reshape(entry["shape"])

    for name in header:
        stem = name.removesuffix(".weight")
        if stem in _WHOLE:
            if stem != "lm_head" or not config.get("tie_word_embeddings", False):
                yield _WHOLE[stem], read(name)
            continue
        _, _, layer, rest = stem.split(".", 3)
        if not rest.startswith("mlp.experts."):
            bits = read(name)
            if config["model_type"] == "llama" and rest.endswith(("q_proj", "k_proj")):
                bits = in_pairs(bits, len(bits) // _head_dim(config))
            yield f"blk.{layer}.{_NAMES[rest]}", bits
        elif rest.startswith("mlp.experts.0."):
            kind = rest.removeprefix("mlp.experts.0.")
            experts = range(config["num_experts"])
            each = [read(name.replace("experts.0.", f"experts.{e}.")) for e in experts]
            yield f"blk.{layer}.{_OF_EXPERTS[kind]}", np.stack(each)


def _refuse_other_tensors(path: Path, header: dict[str, Any]) -> None:
    for name, entry in header.items():
        if entry["dtype"] != BF16:
            raise BatonError(f"{path}: {name} is in {entry['dtype']}; GGUF is made of BF16 only")
        stem = name.removesuffix(".weight")
        rest = stem.split(".", 3)[-1]
        if stem not in _WHOLE and rest not in _NAMES and not rest.startswith("mlp.experts."):
            raise BatonError(f"{path}: {name} has no place in GGUF here")


def _write_tensor(writer: Any, name: str, bits: np.ndarray, kind: Any) -> None:
    if kind is gguf.GGMLQuantizationType.BF16 and not name.endswith(_IN_FP32):
        raw = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
        return
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    if name.endswith(_IN_FP32):
        writer.add_tensor(f"{name}.weight", values)
    else:
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)


def in_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k, which have each head's halves in turn (Hugging Face), in the order in which
    llama.cpp rotates Llama's heads: pairs of a row of the first half and one of the second."""
    heads = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)
