"""transformers: `forward` with its own cache, greedy sampling by argmax."""

from __future__ import annotations

import time

import torch
import transformers
from answer import Needs, answer


class Transformers:
    """Transformers with one checkpoint."""

    def __init__(self, needs: Needs) -> None:
        torch.set_num_threads(needs.threads)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(needs.folder, dtype=getattr(torch, needs.dtype)).eval()
        self.vocab_size = self._model.config.vocab_size
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        """See answer.Peer."""
        tokens = torch.tensor([prompt])
        started = time.perf_counter()
        self._model(tokens, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return time.perf_counter() - started

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """See answer.Peer."""
        out = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        started = time.perf_counter()
        for _ in range(steps):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
        out.logits.argmax(-1)
        return time.perf_counter() - started


if __name__ == "__main__":
    answer(Transformers)
