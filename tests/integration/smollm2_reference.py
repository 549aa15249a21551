"""Questions to SmolLM2, and what transformers answers greedily with the same GGUF file in fp32.

transformers reads the file by the gguf package's reader, which takes a while, so the answers are
kept in `smollm2_references.json`; `python -m tests.integration.smollm2_reference` makes that file,
and a nightly test compares it with what transformers generates. A question whose greedy path has a
near tie is passed over (see `reference`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from checkpoint.model_source import resolve_model
from gateway.text.tokenizer import Tokenizer
from tests.gguf_files import smollm2
from tests.integration.reference import MIN_MARGIN, Reference

KEPT = Path(__file__).with_name("smollm2_references.json")
NUM_TOKENS = 24
NUM_REFERENCES = 40
END = 2
_SUBJECTS = (
    "France", "a rainbow", "the moon", "bread", "a computer", "Shakespeare", "the heart", "water",
    "a prime number", "gravity", "Japan", "the Nile", "music", "a volcano", "honey", "chess",
    "the internet", "a library", "coffee", "Mars", "a whale", "the alphabet",
)  # fmt: skip
_FORMS = ("What is {}?", "Tell me one fact about {}.", "Write a sentence that mentions {}.")


def load_references() -> list[Reference]:
    """All references in the file."""
    return [Reference(tuple(e["prompt"]), tuple(e["output"])) for e in json.loads(KEPT.read_text())]


def prompts() -> list[list[int]]:
    """The questions by the file's own chat template."""
    tokenizer = Tokenizer(resolve_model(smollm2()))
    try:
        assert tokenizer.chat_template is not None
        texts = [
            tokenizer.chat_template.render([{"role": "user", "content": form.format(subject)}])
            for form in _FORMS
            for subject in _SUBJECTS
        ]
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    finally:
        tokenizer.close()


def transformers_model(file: Path) -> Any:
    """transformers' model with the file's weights, in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = load_gguf_checkpoint(str(file))["config"]
    model = LlamaForCausalLM(LlamaConfig(**config))
    found = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    missing = model.load_state_dict(found["tensors"], strict=False).missing_keys
    assert missing == ["lm_head.weight"]  # tied
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def generate(model: Any, prompt: Sequence[int]) -> tuple[list[int], float]:
    """The tokens after a prompt up to the end, and the smallest lead of a chosen token over the
    next likely one."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=END,
        pad_token_id=END,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top = torch.stack(out.logits).squeeze(1).topk(2, dim=-1).values  # [steps, 2]
    return out.sequences[0, len(prompt) :].tolist(), float((top[:, 0] - top[:, 1]).min())


def make_references() -> list[Reference]:
    """What the file holds."""
    model = transformers_model(smollm2())
    found = []
    for prompt in prompts():
        output, margin = generate(model, prompt)
        if margin >= MIN_MARGIN:
            found.append(Reference(tuple(prompt), tuple(output)))
        if len(found) == NUM_REFERENCES:
            return found
    raise AssertionError("there are too few questions without a near tie")


if __name__ == "__main__":
    made = [json.dumps(asdict(each)) for each in make_references()]
    KEPT.write_text("[\n" + ",\n".join(made) + "\n]\n")
