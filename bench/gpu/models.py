"""Whole models, ours and transformers': logits, tokens per second and greedy tokens; and greedy
tokens of our ways of computing, compared with each other.

Each check loads the model that it needs and releases it. With small sizes all checks also run on a
CPU, where they test only the code.

Two computations of one model round differently, so they may diverge where the two best tokens are
nearly equal, and all later text differs. A first divergence is judged by the distance of the two
tokens' logits in fp32, in units of the error of transformers' own bf16 logits at this position: a
bug of ours would show as many units.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.card import BLOCK_SIZE, Card, Row, attention_of
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
from scheduling.sequence import Sequence as EngineSequence

_WHOLE = 512
_FEW_UNITS = "<= 6"
Text = list[list[int]]
"""The tokens that continue each prompt."""


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
    engine.run_ahead(1)  # as in decode workers on a card
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


def _sequence(name: str, prompt: list[int], num_output: int) -> EngineSequence:
    return EngineSequence(
        request_id=name,
        attempt=0,
        tokens=list(prompt),
        num_prompt=len(prompt),
        sampling=SamplingParams(max_tokens=num_output, seed=0, temperature=0.0),
        root_hash=b"bench",
        block_size=BLOCK_SIZE,
        arrival=time.monotonic(),
        deadline=float("inf"),
    )


@dataclass(frozen=True)
class Way:
    """A way of computing: its name, settings of the engine, and the way it is compared with."""

    label: str
    attention: str = "kernel"
    cuda_graphs: bool = False
    chunk: int = _WHOLE
    one_step_ahead: bool = False
    beside: str = ""


WAYS = (
    Way("torch", "torch"),
    Way("eager"),
    Way("graphs", cuda_graphs=True, beside="eager"),
    Way("chunks of 32", cuda_graphs=True, chunk=32, beside="graphs"),
    Way("one step ahead", cuda_graphs=True, one_step_ahead=True, beside="graphs"),
)


@dataclass(frozen=True)
class Prompts:
    """Lengths of random prompts, and the number of output tokens for each."""

    lengths: tuple[int, ...] = (100, 250, 400)
    num_output: int = 64

    def tokens(self, vocab_size: int) -> list[list[int]]:
        """The prompts, the same each time."""
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randint(10, vocab_size, (length,), generator=generator).tolist()
            for length in self.lengths
        ]


def check_exactness(
    card: Card, folder: Path, name: str, prompts: Prompts | None = None
) -> Iterator[Row]:
    """Compare each way's tokens with transformers' and with another way's."""
    wanted = prompts or Prompts()
    asked = wanted.tokens(load_model_config(folder).vocab_size)
    reference = Reference(card, folder, asked)
    expected = reference.greedy(wanted.num_output)
    texts: dict[str, Text] = {}
    for way in WAYS:
        text = texts[way.label] = _greedy(card, folder, way, asked, wanted.num_output)
        yield from _compared(f"{name} {way.label}", text, expected, reference)
        if way.beside:
            label = f"{name} {way.label} beside {way.beside}"
            yield from _compared(label, text, texts[way.beside], reference)


class Reference:
    """A checkpoint run by transformers, and prompts to continue."""

    def __init__(self, card: Card, folder: Path, prompts: list[list[int]]) -> None:
        self._card = card
        self._folder = folder
        self._prompts = prompts
        self._models: dict[torch.dtype, Any] = {}

    def greedy(self, num_output: int) -> Text:
        """The continuations in bf16."""
        text = []
        for prompt in self._prompts:
            ids = torch.tensor([prompt], device=self._card.device)
            out = self._model(torch.bfloat16).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_output,
                do_sample=False,
                eos_token_id=None,
            )
            text.append(out[0, len(prompt) :].tolist())
        return text

    @torch.inference_mode()
    def distance(self, prompt: int, before: Sequence[int], tokens: tuple[int, int]) -> float:
        """Distance of two candidate tokens' logits in fp32, divided by the root mean square error
        of all logits in bf16."""
        ids = torch.tensor([[*self._prompts[prompt], *before]], device=self._card.device)
        exact, rounded = (
            self._model(dtype)(ids).logits[0, -1].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
        error = (rounded - exact).square().mean().sqrt()
        return float((exact[tokens[0]] - exact[tokens[1]]).abs() / error)

    def _model(self, dtype: torch.dtype) -> Any:
        from transformers import AutoModelForCausalLM

        if dtype not in self._models:
            model: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype)
            self._models[dtype] = model.to(self._card.device).eval()
        return self._models[dtype]


def first_difference(text: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two continuations diverge; None if they do not."""
    pairs = enumerate(zip(text, other, strict=True))
    return next((i for i, (a, b) in pairs if a != b), None)


def _compared(label: str, text: Text, other: Text, reference: Reference) -> Iterator[Row]:
    """The number of tokens before the first difference, and the two tokens' distance there."""
    parted = [first_difference(a, b) for a, b in zip(text, other, strict=True)]
    same = sum(len(a) if i is None else i for a, i in zip(text, parted, strict=True))
    total = sum(map(len, text))
    yield Row("exactness", f"{label}: equal tokens", same, "tokens", f"= {total}, or explained")
    for prompt, at in enumerate(parted):
        if at is not None:
            ours, theirs = text[prompt][at], other[prompt][at]
            units = reference.distance(prompt, other[prompt][:at], (ours, theirs))
            note = f"prompt {prompt}, token {at}: {ours} for {theirs}"
            yield Row("exactness", f"{label}: divergence", units, "bf16 errors", _FEW_UNITS, note)


def _greedy(card: Card, folder: Path, way: Way, prompts: list[list[int]], num_output: int) -> Text:
    """The continuations by one engine."""
    config = EngineConfig(
        folder=folder,
        scheduler=SchedulerConfig(
            BLOCK_SIZE,
            max_batch_size=8,
            chunk_min_tokens=way.chunk,
            chunk_max_tokens=way.chunk,
        ),
        dtype="bfloat16",
        device=str(card.device),
        num_blocks=512,
        max_context=1024,
        attention=way.attention,
        cuda_graphs=way.cuda_graphs,
    )
    engine = load_engine(config, time.monotonic).engine
    engine.run_ahead(int(way.one_step_ahead))
    sequences = [
        _sequence(str(number), prompt, num_output) for number, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while engine.scheduler.has_work or engine.is_ahead:
        engine.run(engine.plan())
    return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]
