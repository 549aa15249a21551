"""GGUF files of a small model, with whatever metadata."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from bench.tools.gguf_conversion import finish
from tests.gguf_files import TOKENS, write_metadata

CONFIG = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0},
    "vocab_size": len(TOKENS),
}
U32, F32, TEXT = (
    gguf.GGUFValueType.UINT32,
    gguf.GGUFValueType.FLOAT32,
    gguf.GGUFValueType.STRING,
)


def write(file: Path, name: str = "llama", **others) -> Path:
    """A file with the metadata of a small model, and an embedding alone."""
    writer = gguf.GGUFWriter(file, name)
    write_metadata(writer, name, CONFIG, **others)
    writer.add_tensor("token_embd.weight", np.ones((len(TOKENS), 32), np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(32, np.float32))
    finish(writer)
    return file


def write_pieces(file: Path, tokens: list[str], **others) -> Path:
    """A file with a vocabulary of SentencePiece; `others` are more of its keys."""
    pieces = {
        "model": ("llama", TEXT),
        "tokens": (tokens, gguf.GGUFValueType.ARRAY),
        "scores": ([-float(i) for i in range(len(tokens))], gguf.GGUFValueType.ARRAY),
        **others,
    }
    keys = {f"tokenizer__ggml__{key}": value for key, value in pieces.items()}
    return write(file, has_tokens=False, **keys)
