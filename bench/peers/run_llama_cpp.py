"""llama.cpp by llama-cpp-python's low-level interface: flash attention, bf16 weights, fp16 KV (its
default, with as many bytes as bf16).

A checkpoint that is no GGUF file is converted once to one beside it. One context serves single
prompts, and one serves batches and divides its KV cache among the sequences; a batch has one token
of each.
"""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from answer import Needs, answer

BATCH_TOKENS = 2048
_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


class LlamaCpp:
    """One checkpoint, with room for the given needs and no more."""

    def __init__(self, needs: Needs) -> None:
        if needs.dtype != "bfloat16":
            raise SystemExit("this measures llama.cpp in bfloat16 only")
        path = gguf_file(Path(needs.folder))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        alone = self._make_context(needs.threads, 1, needs.max_context)
        many = self._make_context(needs.threads, needs.max_sequences, needs.num_tokens)
        self._contexts = (alone, many)
        self._context = alone
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.vocab_size = json.loads(Path(needs.folder, "config.json").read_text())["vocab_size"]
        self.version = f"llama-cpp-python {llama_cpp.__version__}"

    def _make_context(self, threads: int, sequences: int, tokens: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = tokens
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise SystemExit("llama.cpp made no context")
        return context

    def prefill(self, prompt: list[int]) -> float:
        """See answer.Peer."""
        self._clear(1)
        started = time.perf_counter()
        self._feed(prompt, 0)
        self._choose(-1)
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """See answer.Peer."""
        self._clear(len(prompts))
        tokens = []
        for sequence, prompt in enumerate(prompts):
            self._feed(prompt, sequence)
            tokens.append(self._choose(-1))
        length = len(prompts[0])
        started = time.perf_counter()
        for step in range(steps):
            rows = [(t, length + step, s, True) for s, t in enumerate(tokens)]
            self._run(rows)
            tokens = [self._choose(row) for row in range(len(rows))]
        return time.perf_counter() - started

    def loss(self, window: list[int]) -> float:
        """See answer.Reader."""
        self._clear(1)
        self._run([(token, i, 0, True) for i, token in enumerate(window)])
        return float(sum(_loss(self._logits(i), token) for i, token in enumerate(window[1:])))

    def _clear(self, num_sequences: int) -> None:
        """Choose the context for this many sequences and empty it."""
        self._context = self._contexts[num_sequences > 1]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def _feed(self, prompt: list[int], sequence: int) -> None:
        last = len(prompt) - 1
        rows = [(t, i, sequence, i == last) for i, t in enumerate(prompt)]
        for start in range(0, len(rows), BATCH_TOKENS):
            self._run(rows[start : start + BATCH_TOKENS])

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        llama_cpp.llama_synchronize(self._context)

    def _choose(self, row: int) -> int:
        return int(self._logits(row).argmax())

    def _logits(self, row: int) -> np.ndarray:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(
            ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,)
        )


def _loss(logits: np.ndarray, token: int) -> float:
    """The negative log-likelihood of a token, in nats."""
    highest = logits.max()
    total = np.exp(logits - highest).sum(dtype=np.float64)
    return float(highest + np.log(total) - logits[token])


def gguf_file(folder: Path) -> Path:
    """The checkpoint's GGUF file: the one that it was made from, else one beside it, which is
    written if it is missing."""
    for link in sorted(folder.glob("model-00001-of-*.gguf")):
        return link.resolve()
    path = folder / "model.bf16.gguf"
    if path.exists():
        return path
    config = json.loads((folder / "config.json").read_text())
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, _ARCHITECTURES[config["architectures"][0]])
    _write_config(writer, config)
    for name, data, shape in _tensors(folder / "model.safetensors"):
        _write_tensor(writer, config, name, data.reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def _write_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")


def rope_theta(config: dict[str, Any]) -> float:
    """The base of the rotary embedding, where transformers 5 or 4 writes it."""
    found = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta")
    return float(found or 10_000.0)


def _tensors(path: Path) -> list[tuple[str, np.ndarray, list[int]]]:
    """Name, bf16 bits as uint16, and shape of each tensor."""
    size = int.from_bytes(path.open("rb").read(8), "little")
    data = np.memmap(path, np.uint8, "r")
    header = json.loads(bytes(data[8 : 8 + size]))
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", name
        begin, end = entry["data_offsets"]
        bits = data[8 + size + begin : 8 + size + end].view(np.uint16)
        found.append((name, bits, entry["shape"]))
    return found


def _write_tensor(writer: Any, config: dict[str, Any], name: str, bits: np.ndarray) -> None:
    if name == "lm_head.weight" and config["tie_word_embeddings"]:
        return
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in whole:
        target = whole[stem]
    else:
        _, _, layer, rest = stem.split(".", 3)
        target = f"blk.{layer}.{_NAMES[rest]}"
        if config["architectures"][0] == "LlamaForCausalLM" and rest.endswith(("q_proj", "k_proj")):
            bits = _interleave(bits, config["head_dim"])
    if bits.ndim == 1:  # norms are fp32 in GGUF
        wide = (bits.astype(np.uint32) << 16).view(np.float32)
        writer.add_tensor(f"{target}.weight", wide)
        return
    kind = gguf.GGMLQuantizationType.BF16
    raw = np.ascontiguousarray(bits).view(np.uint8)
    writer.add_tensor(f"{target}.weight", raw, raw_dtype=kind)


def _interleave(bits: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder rows of q or k from halves (Hugging Face) to pairs, the order in which llama.cpp
    rotates Llama's heads."""
    rows, columns = bits.shape
    heads = bits.reshape(rows // head_dim, 2, head_dim // 2, columns)
    return heads.swapaxes(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    answer(LlamaCpp)
