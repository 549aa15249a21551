"""Prompts of telling lengths, and what transformers generates from them greedily.

Prompts are windows of Python's help text, which the demo model knows, so its logits are peaked.
A window whose greedy path has a near tie is passed over: there, two correct implementations may
differ by rounding.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

DEMO_MODEL = Path(__file__).parents[2] / "demo_model"
BLOCK = 16
NUM_TOKENS = 24
MIN_MARGIN = 1e-3
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


def make_references(seed: int = 20261121) -> list[Reference]:
    """At least 60 of them; deterministic."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    tokens = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(text).ids
    rng = random.Random(seed)
    references = []
    for length in LENGTHS:
        found = 0
        while found < WINDOWS_PER_LENGTH:
            start = rng.randrange(len(tokens) - length)
            prompt = tokens[start : start + length]
            output, margin = _generate(model, prompt)
            if margin >= MIN_MARGIN:
                references.append(Reference(tuple(prompt), tuple(output)))
                found += 1
    assert len(references) >= 60
    return references


@torch.inference_mode()
def _generate(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], float]:
    """Greedy tokens by transformers' `generate`, and the smallest lead of a chosen token."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top = torch.stack(out.logits).squeeze(1).topk(2, dim=-1).values  # [steps, 2]
    return out.sequences[0, len(prompt) :].tolist(), float((top[:, 0] - top[:, 1]).min())
