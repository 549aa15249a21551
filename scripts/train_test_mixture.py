"""Train the mixture of experts that tests serve: 1.6 million weights in 8 experts of 4 layers.

    python scripts/train_test_mixture.py --out tests/mixture

Text, tokenizer, batches and files are those of the demo model (`train_demo_model`). Nothing makes
the router spread tokens evenly, so its loads are as uneven as the text makes them: random routers
spread evenly and would hide errors.
"""

from __future__ import annotations

import torch
from small_model_training import train_for_tests
from train_demo_model import Settings, adam_w, muon, parse_args, shared_config
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

STEPS = 1500
ROW_LENGTHS = {64: 0.2, 128: 0.4, 256: 0.3, 512: 0.1}
TOKENS_PER_STEP = 1024
EXPERTS_RATE = 0.4  # of the learning rate: AdamW takes larger steps than Muon


def main() -> None:
    """Train the model, write it, and report its loss."""
    settings = parse_args("Train the mixture of experts of Baton's tests.", STEPS, can_scale=True)

    def make(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
        return Qwen3MoeForCausalLM(model_config(tokenizer, settings.scale))

    train_for_tests(settings, make, _optimizers, ROW_LENGTHS, TOKENS_PER_STEP)


def model_config(tokenizer: PreTrainedTokenizerFast, scale: int = 1) -> Qwen3MoeConfig:
    """Each token has two experts of eight; the model is `scale` times as wide."""
    return Qwen3MoeConfig(
        hidden_size=128 * scale,
        intermediate_size=256 * scale,
        moe_intermediate_size=96 * scale,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_attention_heads=4 * scale,
        **shared_config(tokenizer),
    )


def _optimizers(
    model: Qwen3MoeForCausalLM, settings: Settings
) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of attention, AdamW for experts, routers, embeddings and norms."""
    rate = settings.learning_rate
    matrices: list[torch.nn.Parameter] = []
    experts: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weights in model.named_parameters():
        if ".mlp." in name:
            experts.append(weights)
        elif weights.ndim == 2 and "embed" not in name:
            matrices.append(weights)
        else:
            others.append(weights)
    return (
        muon(matrices, rate),
        adam_w(others, rate),
        adam_w(experts, EXPERTS_RATE * rate),
    )


if __name__ == "__main__":
    main()
