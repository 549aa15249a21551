"""llama.cpp and its forks by their C interface: flash attention, fp16 KV (their default, as many
bytes as bf16).

A checkpoint's GGUF file is the one that it was made from, else one beside it, which the benchmark
writes first. One context serves single prompts, and one serves batches and divides its KV cache
among the sequences; a batch has one token of each.
"""

from __future__ import annotations

import ctypes
import json
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from answer import Needs

BATCH_TOKENS = 2048


class GgufEngine(ABC):
    """One checkpoint, with room for the given needs and no more. `api`: the Python module with the
    functions of llama.h."""

    def __init__(self, api: Any, needs: Needs) -> None:
        if needs.dtype != "bfloat16":
            raise SystemExit("this measures llama.cpp in bfloat16 only")
        self._api = api
        api.llama_backend_init()
        path = gguf_file(Path(needs.folder))
        self._model = api.llama_model_load_from_file(str(path).encode(), self._model_params())
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {path}")
        alone = self._make_context(needs.threads, 1, needs.max_context)
        many = self._make_context(needs.threads, needs.max_sequences, needs.num_tokens)
        self._contexts = (alone, many)
        self._context = alone
        self._batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.vocab_size = json.loads(Path(needs.folder, "config.json").read_text())["vocab_size"]

    @abstractmethod
    def _model_params(self) -> Any:
        """How the model is loaded."""

    @abstractmethod
    def _use_flash_attention(self, params: Any) -> None:
        """Set it in a context's parameters."""

    @abstractmethod
    def _empty(self) -> None:
        """Empty the chosen context's KV cache."""

    def _make_context(self, threads: int, sequences: int, tokens: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx = tokens
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        self._use_flash_attention(params)
        context = self._api.llama_init_from_model(self._model, params)
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
        self._empty()

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
        status = self._api.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _choose(self, row: int) -> int:
        return int(self._logits(row).argmax())

    def _logits(self, row: int) -> np.ndarray:
        """Waits until they are computed."""
        logits = self._api.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(
            ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,)
        )


def gguf_file(folder: Path) -> Path:
    """The GGUF file of the checkpoint in `folder`."""
    for link in sorted(folder.glob("model-00001-of-*.gguf")):
        return link.resolve()
    return folder / "model.bf16.gguf"


def _loss(logits: np.ndarray, token: int) -> float:
    """The negative log-likelihood of a token, in nats."""
    highest = logits.max()
    total = np.exp(logits - highest).sum(dtype=np.float64)
    return float(highest + np.log(total) - logits[token])
