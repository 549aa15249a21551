"""Comparisons of whole models for bench.gpu: logits and tokens per second, ours and transformers'.

Each check loads the model that it needs and releases it. With small sizes all checks also run on a
CPU, where they test only the code.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.checks import BLOCK_SIZE, Card, Row, attention_of
from engine.attention.base import Segment
from engine.checkpoint.config import load_model_config
from engine.checkpoint.weights import load_weights
from engine.device import kv_torch_dtype
from engine.engine_config import EngineConfig
from engine.gpu.backend import CardBackend
from engine.gpu.flashinfer_backend import FlashInferBackend
from engine.kv_pool import KvPool
from engine.loader import load_engine
from engine.models.decoder import DecoderModel
from protocol.errors import BatonError
from protocol.sampling import SamplingParams
from scheduling.scheduler import SchedulerConfig
from scheduling.sequence import Sequence


@dataclass(frozen=True)
class Load:
    """Requests that arrive at once."""

    num_requests: int = 64
    num_prompt: int = 256
    num_output: int = 128

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Random prompts; prompts of different seeds share no prefix."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.num_requests, self.num_prompt)
        prompts: list[list[int]] = torch.randint(
            10, vocab_size, shape, generator=generator
        ).tolist()
        return prompts


def check_logits(card: Card, folder: Path, name: str, length: int = 400) -> Iterator[Row]:
    """Error of our bf16 logits of a prompt against transformers' in fp32, divided by the error of
    transformers' own bf16 logits."""
    error = LogitsError(card, folder, length)
    ours = error.ours()
    note = f"rms {ours:.4g} against {error.peer:.4g}"
    name = f"{name}: error over transformers' own"
    yield Row("logits", name, ours / error.peer, "x", "<= 1.5", note)


class LogitsError:
    """Root mean square error of logits of one prompt against transformers' in fp32."""

    def __init__(self, card: Card, folder: Path, length: int = 400) -> None:
        self._card = card
        self._folder = folder
        vocab_size = load_model_config(folder).vocab_size
        (prompt,) = Load(1, length).prompts(vocab_size, seed=0)
        self._ids = torch.tensor(prompt, device=card.device)
        self._exact = _transformers_logits(card, folder, self._ids, torch.float32)
        self.peer = self._of(_transformers_logits(card, folder, self._ids, torch.bfloat16))

    def ours(self, weight_bits: int = 16, kv_dtype: str = "bfloat16") -> float:
        """The error of our own logits, in bf16 except as the arguments say."""
        return self._of(_our_logits(self._card, self._folder, self._ids, weight_bits, kv_dtype))

    def _of(self, logits: torch.Tensor) -> float:
        return float((logits - self._exact).square().mean().sqrt())


def check_throughput(card: Card, folder: Path, name: str, load: Load) -> Iterator[Row]:
    """Tokens per second of a batch of requests including prefill, and those of transformers'
    continuous batching."""
    ours = _our_rate(card, folder, load)
    yield Row("peer", f"{name}: ours", ours, "tokens/s", note=f"{load}")
    peer = _transformers_rate(card, folder, load)
    yield Row("peer", f"{name}: transformers' continuous batching", peer, "tokens/s")
    yield Row("peer", f"{name}: ours over transformers'", ours / peer, "x")


@torch.inference_mode()
def _transformers_logits(
    card: Card, folder: Path, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[tokens, vocab], fp32."""
    logits: torch.Tensor = _transformers(card, folder, dtype)(ids[None]).logits[0]
    return logits.float()


def _transformers(card: Card, folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(card.device).eval()


def _our_logits(
    card: Card, folder: Path, ids: torch.Tensor, weight_bits: int, kv_dtype: str
) -> torch.Tensor:
    """[tokens, vocab], fp32, of a bf16 model: with FlashInfer on a card, else with torch."""
    config, device, dtype = load_model_config(folder), card.device, torch.bfloat16
    weights = load_weights(folder, config, device, dtype, None)
    choice = FlashInferBackend if device.type == "cuda" else CardBackend
    backend = choice(config, device, dtype, kv_torch_dtype(kv_dtype), weight_bits=weight_bits)
    model = DecoderModel(config, weights, backend)
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    pool = KvPool(config.kv_layout("bench", BLOCK_SIZE, kv_dtype), num_blocks, device)
    attention = backend.attention(pool)
    attention.plan([Segment(len(ids), len(ids), range(num_blocks))])
    return model.forward(ids, torch.arange(len(ids), device=device), attention)


def _our_rate(card: Card, folder: Path, load: Load) -> float:
    context = load.num_prompt + load.num_output
    config = EngineConfig(
        folder=folder,
        scheduler=SchedulerConfig(
            BLOCK_SIZE,
            max_batch_size=load.num_requests,
            chunk_min_tokens=2048,
            chunk_max_tokens=2048,
        ),
        dtype="bfloat16",
        device=str(card.device),
        num_blocks=load.num_requests * (-(-context // BLOCK_SIZE) + 1),
        max_context=context + BLOCK_SIZE,
        attention=attention_of(str(card.device)),
    )
    engine = load_engine(config, time.monotonic).engine
    engine.one_step_ahead = True  # as in decode workers on a card
    seconds = 0.0
    for turn in range(2):  # the first does not count
        for number, prompt in enumerate(load.prompts(engine.limits.vocab_size, turn)):
            engine.scheduler.add(_sequence(f"{turn}-{number}", prompt, load.num_output))
        started = time.perf_counter()
        while engine.scheduler.has_work or engine.is_ahead:
            engine.run(engine.plan())
        seconds = time.perf_counter() - started
    return load.num_requests * load.num_output / seconds


def _transformers_rate(card: Card, folder: Path, load: Load) -> float:
    from transformers import GenerationConfig

    model = _transformers(card, folder, torch.bfloat16)
    config = GenerationConfig(max_new_tokens=load.num_output, do_sample=False, eos_token_id=-1)
    rate = 0.0
    for turn in range(2):  # the first does not count
        prompts = load.prompts(model.config.vocab_size, turn)
        outputs = list(model.generate_batch(prompts, generation_config=config).values())
        tokens = sum(len(output.generated_tokens) for output in outputs)
        if tokens < load.num_requests * load.num_output:
            raise BatonError(f"transformers gave {tokens} tokens: {outputs and outputs[0].error}")
        # Timed by its own clock: each call first captures its graphs again
        began = min(output.created_time for output in outputs)
        rate = tokens / (max(output.lifespan[1] for output in outputs) - began)
    return rate


def _sequence(name: str, prompt: list[int], num_output: int) -> Sequence:
    return Sequence(
        request_id=name,
        attempt=0,
        tokens=prompt,
        num_prompt=len(prompt),
        sampling=SamplingParams(max_tokens=num_output, seed=0, temperature=0.0),
        root_hash=b"bench",
        block_size=BLOCK_SIZE,
        arrival=time.monotonic(),
        deadline=float("inf"),
    )
