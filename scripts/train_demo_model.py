"""Train the bundled demo model: a Qwen3-shaped network of 2 million weights and its tokenizer.

    python scripts/train_demo_model.py --out demo_model --steps 3500 --seed 0

Owns the tokenizer, the batches, the training loop and the Hugging Face files it writes;
`demo_corpus` makes the text. The network is meant to know its text by heart, so that its greedy
choices are clear ones. Invariants: the same seed, steps, threads, Python and torch give the same
files; the report at the end measures the bf16 weights on disk, not those in training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from demo_corpus import Message, Topic, chats, load_topics
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 2048
MAX_POSITIONS = 4096
TOKENS_PER_STEP = 2048
ROPE_THETA = 10_000.0
# How long the rows of a batch are, and how often: long ones are slow, and few are enough.
ROW_LENGTHS = {128: 0.12, 256: 0.38, 512: 0.26, 1024: 0.15, 2048: 0.07, 4096: 0.02}
CHAT_SHARE = 0.4

CHAT_TEMPLATE = """\
{%- if tools or documents %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}
{{- messages[0]['content'] + '\\n\\n' }}
{%- endif %}
{%- if documents %}
{{- 'Answer from these documents:\\n<documents>\\n' }}
{%- for document in documents %}
{{- document | tojson + '\\n' }}
{%- endfor %}
{{- '</documents>\\n' }}
{%- endif %}
{%- if tools %}
{{- 'Functions to call:\\n<tools>\\n' }}
{%- for tool in tools %}
{{- tool['function'] | tojson + '\\n' }}
{%- endfor %}
{{- '</tools>\\nWrite a call as <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not ((tools or documents) and loop.first and message['role'] == 'system') %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{{- part['text'] }}
{%- endfor %}
{%- endif %}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n<tool_call>\\n' + call['function'] | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""

SAMPLE_QUESTIONS = ("Explain the `with` statement.", "What is a lambda?", "Who are you?")


@dataclass(frozen=True)
class Settings:
    """How to train: where to, for how many steps, and from which seed."""

    out: Path
    steps: int
    minutes: float | None
    seed: int
    learning_rate: float
    threads: int
    scale: int = 1


def main() -> None:
    """Train the tokenizer, then the model; write both; load them again and report."""
    settings = parse_args()
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    topics = load_topics()
    tokenizer = train_tokenizer(topics, settings.seed)
    model = Qwen3ForCausalLM(model_config(tokenizer))
    optimizers = _optimizers(model, settings.learning_rate)
    loss = train(model, batches(tokenizer, topics, settings.seed), settings, optimizers)
    write(model, tokenizer, settings.out)
    report(settings, topics, loss)


def parse_args(
    what: str = "Train Baton's bundled demo model.", steps: int = 3500, can_scale: bool = False
) -> Settings:
    """The flags. `steps` is the default number of steps; `can_scale`: whether wider models can be
    trained, too."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=steps, help=f"optimiser steps ({steps})")
    parser.add_argument(
        "--minutes", type=float, help="stop after this long instead (not reproducible)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (0)")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="at its peak (5e-3)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (1)")
    if can_scale:
        parser.add_argument("--scale", type=int, default=1, help="how many times as wide (1)")
    return Settings(**vars(parser.parse_args()))


def train_tokenizer(topics: list[Topic], seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCAB_SIZE tokens; the last three are the special ones."""
    some_chats = chats(topics, random.Random(seed))
    questions = [next(some_chats)[-2]["content"] for _ in range(500)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, TURN_START, TURN_END]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    roles = "system\nuser\nassistant\n" * 100
    bpe.train_from_iterator([*(topic.text for topic in topics), *questions, roles], trainer)
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call,unused-ignore]
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=192,
        intermediate_size=512,
        num_attention_heads=6,
        **shared_config(tokenizer),
    )


def shared_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The part of the configuration that all models with this tokenizer share."""
    return {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def batches(
    tokenizer: PreTrainedTokenizerFast,
    topics: list[Topic],
    seed: int,
    row_lengths: Mapping[int, float] = ROW_LENGTHS,
    tokens_per_step: int = TOKENS_PER_STEP,
) -> Iterator[torch.Tensor]:
    """Token ids without end, each batch of one row length: [rows, row_length], int64."""
    rng = random.Random(seed + 1)
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    texts = [[*tokenizer.encode(topic.text, verbose=False), end] for topic in topics]
    talk = (tokenizer.encode(_render(tokenizer, chat)) for chat in chats(topics, rng))
    while True:
        (length,) = rng.choices(list(row_lengths), weights=list(row_lengths.values()))
        rows = [
            _chat_row(talk, length) if rng.random() < CHAT_SHARE else _text_row(texts, length, rng)
            for _ in range(max(1, tokens_per_step // length))
        ]
        yield torch.tensor(rows)


def _render(
    tokenizer: PreTrainedTokenizerFast, chat: list[Message], add_generation_prompt: bool = False
) -> str:
    return str(
        tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    )


def _chat_row(talk: Iterator[list[int]], length: int) -> list[int]:
    """Chats one after another; the first begins the row, the last may be cut off."""
    row: list[int] = []
    while len(row) < length:
        row += next(talk)
    return row[:length]


def _text_row(texts: list[list[int]], length: int, rng: random.Random) -> list[int]:
    """Topics one after another, from anywhere in the first (a third of the time, its start)."""
    (text,) = rng.choices(texts, weights=[len(text) for text in texts])
    row = text[0 if rng.random() < 1 / 3 else rng.randrange(len(text)) :]
    while len(row) < length:
        row = row + rng.choice(texts)
    return row[:length]


def train(
    model: PreTrainedModel,
    data: Iterator[torch.Tensor],
    settings: Settings,
    optimizers: Sequence[torch.optim.Optimizer],
    in_bf16: bool = True,
) -> float:
    """Fit the model in place, with products in bf16 or not; returns the mean loss (nats) of the
    last 100 steps."""
    model.train()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    losses: list[float] = []
    started = time.monotonic()
    step = 0
    while (done := _progress(step, started, settings)) < 1:
        ids = next(data)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_bf16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * _schedule(step, done)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
        if step % 100 == 0:
            seconds = time.monotonic() - started
            print(f"step {step}: loss {_tail_mean(losses):.3f}, {seconds:.0f} s", flush=True)
    return _tail_mean(losses)


def _optimizers(model: Qwen3ForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms.

    Muon (Jordan et al., 2024; step sizes matched to AdamW's as in Liu et al., 2025) learns this
    text by heart in a third of the steps that AdamW alone needs.
    """
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weights in model.named_parameters():
        (matrices if weights.ndim == 2 and "embed" not in name else others).append(weights)
    return [muon(matrices, learning_rate), adam_w(others, learning_rate)]


def muon(matrices: list[torch.nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        matrices, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )


def adam_w(weights: list[torch.nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)


def _progress(step: int, started: float, settings: Settings) -> float:
    """How much of the training is done, 0 to 1: by the clock if minutes are set, else by steps."""
    if settings.minutes is not None:
        return (time.monotonic() - started) / (60 * settings.minutes)
    return step / settings.steps


def _schedule(step: int, done: float) -> float:
    """A share of the peak learning rate: 100 steps of warm-up, then a cosine down to 1 %."""
    return min(1.0, (step + 1) / 100) * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)


def _tail_mean(losses: list[float]) -> float:
    tail = losses[-100:]
    return sum(tail) / max(1, len(tail))


def write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the folder in Hugging Face's format, weights in bf16, readable by old tools too."""
    model.generation_config = GenerationConfig.from_dict(
        {
            "do_sample": False,
            "eos_token_id": [tokenizer.eos_token_id, tokenizer.pad_token_id],
            "pad_token_id": tokenizer.pad_token_id,
        }
    )
    model.bfloat16().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    # Transformers 5 writes new keys and class names; other readers know these.
    classic = {"rope_theta": ROPE_THETA, "rope_scaling": None, "torch_dtype": "bfloat16"}
    _update_json(out / "config.json", classic)
    _update_json(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def _update_json(path: Path, values: Mapping[str, object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@torch.inference_mode()
def report(settings: Settings, topics: list[Topic], loss: float) -> None:
    """Load the written model. Print how well it knows its text, and some of its answers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.out)
    model = Qwen3ForCausalLM.from_pretrained(settings.out, dtype=torch.float32)
    size = sum(path.stat().st_size for path in settings.out.iterdir())
    digest = hashlib.sha256("".join(topic.text for topic in topics).encode()).hexdigest()[:16]
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, corpus sha256 {digest}")
    print(f"{model.num_parameters():,} weights, {size / 1e6:.2f} MB, training loss {loss:.3f}")
    data = batches(tokenizer, topics, settings.seed + 1000)
    evaluated = [model(input_ids=ids, labels=ids).loss.item() for ids in islice(data, 40)]
    print(f"loss of the written weights on fresh batches: {sum(evaluated) / len(evaluated):.3f}")
    for question in SAMPLE_QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.encode(_render(tokenizer, chat, add_generation_prompt=True))
        print(f"\n> {question}\n{tokenizer.decode(_continue(model, ids, 160))}")


def _continue(model: Qwen3ForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """The likeliest token, again and again, until the end of the turn or num_tokens."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == model.config.eos_token_id:
            break
    return ids[len(prompt) :]


if __name__ == "__main__":
    main()
