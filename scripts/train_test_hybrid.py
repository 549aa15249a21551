"""Train the hybrid that tests serve: two layers with a gated delta rule and one with attention.

    python scripts/train_test_hybrid.py --out tests/hybrid

Text, tokenizer, batches and files are those of the demo model (`train_demo_model`). States of
random weights say little about the tokens before them, and would hide errors.
"""

from __future__ import annotations

import torch
from small_model_training import train_for_tests
from train_demo_model import Settings, adam_w, muon, parse_args, shared_config
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

STEPS = 1500
ROW_LENGTHS = {64: 0.6, 128: 0.4}
TOKENS_PER_STEP = 512


def main() -> None:
    """Train the model, write it, and report its loss."""
    settings = parse_args("Train the hybrid of Baton's tests.", STEPS, can_scale=True)

    def make(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5ForCausalLM:
        return Qwen3_5ForCausalLM(model_config(tokenizer, settings.scale))

    train_for_tests(settings, make, _optimizers, ROW_LENGTHS, TOKENS_PER_STEP, in_bf16=False)


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
