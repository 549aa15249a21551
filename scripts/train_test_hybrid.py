"""Train the hybrid that tests serve: two layers with a gated delta rule and one with attention.

    python scripts/train_test_hybrid.py --out tests/hybrid

Text, tokenizer, batches and files are those of the demo model (`train_demo_model`). States of
random weights say little about the tokens before them, and would hide errors.
"""

from __future__ import annotations

from itertools import islice

import torch
from demo_corpus import load_topics
from train_demo_model import (
    Settings,
    adam_w,
    batches,
    muon,
    parse_args,
    shared_config,
    train,
    train_tokenizer,
    write,
)
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

STEPS = 1500
ROW_LENGTHS = {64: 0.6, 128: 0.4}
TOKENS_PER_STEP = 512


def main() -> None:
    """Train the model, write it with its tokenizer, and report its loss on fresh batches."""
    settings = parse_args("Train the hybrid of Baton's tests.", STEPS, can_scale=True)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    topics = load_topics()
    tokenizer = train_tokenizer(topics, settings.seed)
    model = Qwen3_5ForCausalLM(model_config(tokenizer, settings.scale))
    data = batches(tokenizer, topics, settings.seed, ROW_LENGTHS, TOKENS_PER_STEP)
    optimizers = _optimizers(model, settings)
    loss = train(model, data, settings, optimizers, in_bf16=False)
    write(model, tokenizer, settings.out)
    print(f"{model.num_parameters():,} weights, training loss {loss:.3f}")
    with torch.inference_mode():
        model.eval().float()
        fresh = islice(batches(tokenizer, topics, settings.seed + 1000, ROW_LENGTHS), 10)
        losses = [model(input_ids=ids, labels=ids).loss.item() for ids in fresh]
    print(f"loss of the written weights on fresh batches: {sum(losses) / len(losses):.3f}")


def model_config(tokenizer: PreTrainedTokenizerFast, scale: int = 1) -> Qwen3_5TextConfig:
    """Small enough to be trained in minutes; `scale` times as wide."""
    shared = shared_config(tokenizer) | {"num_hidden_layers": 3, "num_key_value_heads": 1}
    return Qwen3_5TextConfig(
        hidden_size=96 * scale,
        intermediate_size=192 * scale,
        num_attention_heads=3 * scale,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=24 * scale,
        linear_value_head_dim=24 * scale,
        **shared,
    )


def _optimizers(model: Qwen3_5ForCausalLM, settings: Settings) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for matrices, AdamW for embeddings and the rest. AdamW for all of a wider model, where
    Muon's products would take three quarters of a step."""
    if settings.scale > 1:
        return (adam_w(list(model.parameters()), settings.learning_rate),)
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weights in model.named_parameters():
        is_matrix = weights.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(weights)
    rate = settings.learning_rate
    return muon(matrices, rate), adam_w(others, rate)


if __name__ == "__main__":
    main()
