"""Train the mixture of experts that tests serve: 1.6 million weights in 8 experts of 4 layers.

    python scripts/train_test_mixture.py --out tests/mixture

Text, tokenizer, batches and files are those of the demo model (`train_demo_model`). Nothing makes
the router spread tokens evenly, so its loads are as uneven as the text makes them: random routers
spread evenly and would hide errors.
"""

from __future__ import annotations

from itertools import islice

import torch
from demo_corpus import load_topics
from train_demo_model import (
    adam_w,
    batches,
    muon,
    parse_args,
    shared_config,
    train,
    train_tokenizer,
    write,
)
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

STEPS = 1500
ROW_LENGTHS = {64: 0.2, 128: 0.4, 256: 0.3, 512: 0.1}
TOKENS_PER_STEP = 1024
EXPERTS_RATE = 0.4  # of the learning rate: AdamW takes larger steps than Muon


def main() -> None:
    """Train the model, write it with its tokenizer, and report its loss on fresh batches."""
    settings = parse_args("Train the mixture of experts of Baton's tests.", STEPS, can_scale=True)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    topics = load_topics()
    tokenizer = train_tokenizer(topics, settings.seed)
    model = Qwen3MoeForCausalLM(model_config(tokenizer, settings.scale))
    data = batches(tokenizer, topics, settings.seed, ROW_LENGTHS, TOKENS_PER_STEP)
    loss = train(model, data, settings, _optimizers(model, settings.learning_rate))
    write(model, tokenizer, settings.out)
    print(f"{model.num_parameters():,} weights, training loss {loss:.3f}")
    with torch.inference_mode():
        model.eval().float()
        fresh = islice(batches(tokenizer, topics, settings.seed + 1000, ROW_LENGTHS), 10)
        losses = [model(input_ids=ids, labels=ids).loss.item() for ids in fresh]
    print(f"loss of the written weights on fresh batches: {sum(losses) / len(losses):.3f}")


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
    model: Qwen3MoeForCausalLM, learning_rate: float
) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of attention, AdamW for experts, routers, embeddings and norms."""
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
        muon(matrices, learning_rate),
        adam_w(others, learning_rate),
        adam_w(experts, EXPERTS_RATE * learning_rate),
    )


if __name__ == "__main__":
    main()
