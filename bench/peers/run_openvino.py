"""OpenVINO by optimum-intel: converts the checkpoint at load, samples greedily by argmax."""

from __future__ import annotations

import time
from importlib.metadata import version

import optimum.intel
import torch
from answer import Needs, answer


class OpenVino:
    """One checkpoint, weights and arithmetic in bf16."""

    def __init__(self, needs: Needs) -> None:
        if needs.dtype != "bfloat16":
            raise SystemExit("this measures OpenVINO in bfloat16 only")
        self._model = optimum.intel.OVModelForCausalLM.from_pretrained(
            needs.folder,
            export=True,
            ov_config={
                "INFERENCE_PRECISION_HINT": "bf16",
                "KV_CACHE_PRECISION": "bf16",
                "INFERENCE_NUM_THREADS": str(needs.threads),
                "PERFORMANCE_HINT": "LATENCY",
            },
        )
        self.vocab_size = self._model.config.vocab_size
        names = ("openvino", "optimum-intel")
        self.version = ", ".join(f"{name} {version(name)}" for name in names)

    def prefill(self, prompt: list[int]) -> float:
        """See answer.Peer."""
        started = time.perf_counter()
        self._forward(torch.tensor([prompt]), 0, None)
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """See answer.Peer."""
        token, past = self._forward(torch.tensor(prompts), 0, None)
        started = time.perf_counter()
        for step in range(steps):
            token, past = self._forward(token, len(prompts[0]) + step, past)
        return time.perf_counter() - started

    def _forward(
        self, tokens: torch.Tensor, before: int, past: object
    ) -> tuple[torch.Tensor, object]:
        rows, length = tokens.shape
        positions = torch.arange(before, before + length).expand(rows, -1)
        out = self._model(
            input_ids=tokens,
            attention_mask=torch.ones((rows, before + length), dtype=torch.int64),
            position_ids=positions,
            past_key_values=past,
        )
        return out.logits[:, -1:].argmax(-1), out.past_key_values


if __name__ == "__main__":
    answer(OpenVino)
