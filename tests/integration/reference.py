"""Prompts of telling lengths, and what transformers generates from them greedily.

Prompts are windows of Python's help text, which the demo model knows, so its logits are peaked.
A window whose greedy path has a near tie is passed over: there, two correct implementations may
differ by rounding, which is coarse in the bf16 of most fleets of tests. transformers takes half a
minute for all of them, so they are kept in `references.json`, which
`python -m tests.integration.reference` makes; a test compares them with what transformers
generates.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tests.paths import DEMO_MODEL

KEPT = Path(__file__).with_name("references.json")
BLOCK = 16
NUM_TOKENS = 24
MIN_MARGIN = 0.1  # between two logits
# One token; shorter than a block; exactly 1, 2 and k blocks, one less and one more; long ones.
LENGTHS = sorted(
    {1, 2, 7, 100, 300, 700, 1500, 1999, 2000}
    | {k * BLOCK + d for k in (1, 2, 3, 4, 8, 16, 32, 64) for d in (-1, 0, 1)}
)
WINDOWS_PER_LENGTH = 2


@dataclass(frozen=True)
class Reference:
    """A prompt, and the tokens that follow it greedily in fp32, end-of-text ignored."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


def load_references() -> list[Reference]:
    """At least 60 of them, from shortest to longest."""
    kept = json.loads(KEPT.read_text())
    return [Reference(tuple(each["prompt"]), tuple(each["output"])) for each in kept]


def make_references(seed: int = 20261121) -> list[Reference]:
    """Make what the file holds. The result is the same for the same Python, whose help is the
    text."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    tokens = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(text).ids
    rng = random.Random(seed)
    generate = GreedyGeneration()
    references = []
    for length in LENGTHS:
        found = 0
        while found < WINDOWS_PER_LENGTH:
            start = rng.randrange(len(tokens) - length)
            prompt = tokens[start : start + length]
            output, margin = generate(prompt)
            if margin >= MIN_MARGIN:
                references.append(Reference(tuple(prompt), tuple(output)))
                found += 1
    assert len(references) >= 60
    return references


class GreedyGeneration:
    """transformers' `generate` with a model in fp32."""

    def __init__(self, folder: Path = DEMO_MODEL, num_tokens: int = NUM_TOKENS) -> None:
        from transformers import AutoModelForCausalLM

        self._num_tokens = num_tokens
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int]) -> tuple[list[int], float]:
        """The tokens after a prompt, and the smallest lead of a chosen token over the next likely
        one."""
        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self._num_tokens,
            min_new_tokens=self._num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        top = torch.stack(out.logits).squeeze(1).topk(2, dim=-1).values  # [steps, 2]
        return out.sequences[0, len(prompt) :].tolist(), float((top[:, 0] - top[:, 1]).min())


def clear_references(folder: Path, lengths: Sequence[int], of_each: int = 2) -> list[Reference]:
    """Prompts of these lengths from Python's help text, and what transformers makes of them with a
    trained model in `folder`."""
    generate = GreedyGeneration(folder)
    text = pydoc_data.topics.topics["with"] + pydoc_data.topics.topics["lambda"]
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids

    def clear(length: int) -> Iterator[Reference]:
        for start in range(0, len(tokens) - length, 13):
            prompt = tokens[start : start + length]
            output, margin = generate(prompt)
            if margin >= MIN_MARGIN:
                yield Reference(tuple(prompt), tuple(output))

    found = [each for length in lengths for each in islice(clear(length), of_each)]
    assert len(found) == of_each * len(lengths), "the model is too unsure of the text"
    return found


if __name__ == "__main__":
    made = [json.dumps(asdict(each)) for each in make_references()]
    KEPT.write_text("[\n" + ",\n".join(made) + "\n]\n")
