"""The benchmark's checkpoints: real shapes, random weights, made once and kept.

M1 is Llama-shaped with some 100M parameters, M2 is shaped like Qwen3-0.6B. M3 is M2 changed so that
a wrong KV gives wrong tokens. With tied embeddings, random weights repeat the last token and attend
to all tokens nearly alike, whatever the KV holds; so M3's embeddings are not tied, and its norms of
q and k make attention sparse. M4 is a mixture of experts like Qwen3-MoE, with 1.6 billion
weights, of which each token uses half a billion. Weights are seeded, so every machine measures the
same numbers. Knows no engines.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

SHAPES: dict[str, dict[str, Any]] = {
    "M1": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "vocab_size": 32_000,
        "tie_word_embeddings": False,
    },
    "M2": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
}
SHAPES["M3"] = SHAPES["M2"] | {"tie_word_embeddings": False, "vocab_size": 32_000}
SHAPES["M4"] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 64_000,
    "tie_word_embeddings": False,
}
_QK_NORMS = {"M3": 2.0}
_REST = {
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def benchmark_checkpoint(name: str) -> Path:
    """The folder of M1, M2, M3 or M4 in the user's cache; made if it is missing."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "baton" / "bench" / name
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        config = SHAPES[name] | _REST
        Path(made, "config.json").write_text(json.dumps(config, indent=2))
        weights = random_weights(config, _QK_NORMS.get(name, 1.0))
        save_file(weights, Path(made, "model.safetensors"), {"format": "pt"})
        Path(made).rename(folder)
        Path(made).mkdir()  # TemporaryDirectory removes it
    return folder


def add_tokenizer(folder: Path) -> None:
    """Add a tokenizer with a word for every token id, so that servers can load the checkpoint."""
    path, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not settings.exists():  # without it transformers guesses from the model's type
        _write(settings, json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    if path.exists():
        return
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = {f"w{token_id}": token_id for token_id in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.decoder = ByteLevel()
    _write(path, tokenizer.to_str())


def _write(path: Path, text: str) -> None:
    """Write the file atomically, even if other processes do the same."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.rename(path)


def random_weights(config: dict[str, Any], qk_norm: float = 1.0) -> dict[str, torch.Tensor]:
    """Normal weights with a standard deviation of 0.02 and norms of 1 (`qk_norm` for q and k), by
    Hugging Face's names, in bf16."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    inner, vocab = config["intermediate_size"], config["vocab_size"]

    def normal(rows: int, columns: int) -> torch.Tensor:
        return (0.02 * torch.randn((rows, columns), generator=generator)).bfloat16()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": normal(vocab, hidden),
        "model.norm.weight": ones(hidden),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": ones(hidden),
            "post_attention_layernorm.weight": ones(hidden),
            "self_attn.q_proj.weight": normal(q, hidden),
            "self_attn.k_proj.weight": normal(kv, hidden),
            "self_attn.v_proj.weight": normal(kv, hidden),
            "self_attn.o_proj.weight": normal(hidden, q),
        }
        if "num_experts" in config:
            layer["mlp.gate.weight"] = normal(config["num_experts"], hidden)
            inner = config["moe_intermediate_size"]
        for each in range(config.get("num_experts", 1)):
            prefix = f"mlp.experts.{each}" if "num_experts" in config else "mlp"
            layer[f"{prefix}.gate_proj.weight"] = normal(inner, hidden)
            layer[f"{prefix}.up_proj.weight"] = normal(inner, hidden)
            layer[f"{prefix}.down_proj.weight"] = normal(hidden, inner)
        if config["model_type"].startswith("qwen3"):
            norm = qk_norm * ones(head)
            layer |= {"self_attn.q_norm.weight": norm, "self_attn.k_norm.weight": norm.clone()}
        weights |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    return weights


def served_checkpoint(name: str) -> Path:
    """The folder of a benchmark's model, with a tokenizer, as fleets need it."""
    folder = benchmark_checkpoint(name)
    add_tokenizer(folder)
    return folder
