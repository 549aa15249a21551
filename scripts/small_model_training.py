"""The training of small models for tests, on the text and with the tokenizer of the demo model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import torch
from demo_corpus import load_topics
from train_demo_model import Settings, batches, train, train_tokenizer, write
from transformers import PreTrainedModel, PreTrainedTokenizerFast

M = TypeVar("M", bound=PreTrainedModel)


def train_for_tests(
    settings: Settings,
    make: Callable[[PreTrainedTokenizerFast], M],
    optimizers: Callable[[M, Settings], Sequence[torch.optim.Optimizer]],
    lengths: Mapping[int, float],
    tokens_per_step: int,
    in_bf16: bool = True,
) -> None:
    """Train the model, write it with its tokenizer, and report its loss on fresh batches.
    `lengths`: the lengths of rows, and the share of each."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    topics = load_topics()
    tokenizer = train_tokenizer(topics, settings.seed)
    model = make(tokenizer)
    data = batches(tokenizer, topics, settings.seed, lengths, tokens_per_step)
    loss = train(model, data, settings, optimizers(model, settings), in_bf16)
    write(model, tokenizer, settings.out)
    print(f"{model.num_parameters():,} weights, training loss {loss:.3f}")
    with torch.inference_mode():
        model.eval().float()
        fresh = islice(batches(tokenizer, topics, settings.seed + 1000, lengths), 10)
        losses = [model(input_ids=ids, labels=ids).loss.item() for ids in fresh]
    print(f"loss of the written weights on fresh batches: {sum(losses) / len(losses):.3f}")
