"""Greedy tokens of a checkpoint on a card: ours compared with transformers', and our ways of
computing compared with each other.

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

from bench.gpu.checks import BLOCK_SIZE, Card, Row
from engine.checkpoint.config import load_model_config
from engine.engine_config import EngineConfig
from engine.loader import load_engine
from protocol.sampling import SamplingParams
from scheduling.scheduler import SchedulerConfig
from scheduling.sequence import Sequence as EngineSequence

_WHOLE = 512
_FEW_UNITS = "<= 6"

Text = list[list[int]]
"""The continuation of each prompt."""


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
    engine.one_step_ahead = way.one_step_ahead
    sequences = [_sequence(number, prompt, num_output) for number, prompt in enumerate(prompts)]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while engine.scheduler.has_work or engine.is_ahead:
        engine.run(engine.plan())
    return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]


def _sequence(number: int, prompt: list[int], num_output: int) -> EngineSequence:
    return EngineSequence(
        request_id=f"bench-{number}",
        attempt=0,
        tokens=list(prompt),
        num_prompt=len(prompt),
        sampling=SamplingParams(max_tokens=num_output, seed=0, temperature=0.0),
        root_hash=b"bench",
        block_size=BLOCK_SIZE,
        arrival=time.monotonic(),
        deadline=float("inf"),
    )
