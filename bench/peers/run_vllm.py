"""vLLM on a CPU, in one process, driven step by step; prefix caching off."""

from __future__ import annotations

import os
import time

from answer import Needs, answer


class Vllm:
    """One checkpoint, with room for the given needs and no more."""

    def __init__(self, needs: Needs) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{needs.threads - 1}"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(needs.kv_gib)
        import vllm

        self._sampling = vllm.SamplingParams
        self._llm = vllm.LLM(
            needs.folder,
            dtype=needs.dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=needs.max_context,
            max_num_seqs=needs.max_sequences,
            max_num_batched_tokens=max(needs.step_tokens, needs.max_context),
        )
        self._count = 0
        self.vocab_size = self._llm.llm_engine.model_config.get_vocab_size()
        self.version = f"vLLM {vllm.__version__}"

    def prefill(self, prompt: list[int]) -> float:
        """See answer.Peer."""
        self._add(prompt, 1)
        started = time.perf_counter()
        self._drain()
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """See answer.Peer."""
        names = {self._add(prompt, steps + 2) for prompt in prompts}
        engine = self._llm.llm_engine
        while names:  # until every prompt has its first token
            names -= {out.request_id for out in engine.step() if out.outputs[0].token_ids}
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        elapsed = time.perf_counter() - started
        self._drain()
        return elapsed

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._count += 1
        name = str(self._count)
        params = self._sampling(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _drain(self) -> None:
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()


if __name__ == "__main__":
    answer(Vllm)
