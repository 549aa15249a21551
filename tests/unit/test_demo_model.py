"""The bundled demo model is complete, small, and does what the demo and other tests rely on.

Other tests compare greedy tokens exactly, so this one also holds that its choices are clear ones.
"""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer

from tests.paths import DEMO_MODEL

FOLDER = DEMO_MODEL
MAX_FOLDER_BYTES = 8_000_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < MAX_FOLDER_BYTES


def test_every_weight_is_finite_bf16_and_named_once() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    with safe_open(FOLDER / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        for name in names:
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert torch.isfinite(tensor).all(), name
    assert config["tie_word_embeddings"]
    assert "lm_head.weight" not in names
    assert len(names) == 2 + 11 * config["num_hidden_layers"]


def test_config_has_the_keys_of_old_and_new_readers() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000
    assert config["rope_scaling"] is None
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 4096


def test_special_tokens_agree_in_every_file(tokenizer: Tokenizer) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert tokenizer.eos_token == "<|im_end|>"
    assert generation["eos_token_id"] == ids
    assert config["eos_token_id"] == ids[0]
    assert generation["do_sample"] is False
    assert len(tokenizer) == config["vocab_size"]


def test_chat_template_renders_system_and_several_turns(tokenizer: Tokenizer) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a lambda?"},
        {"role": "assistant", "content": "A function."},
        {"role": "user", "content": [{"type": "text", "text": "Tell me "}, {"text": "more."}]},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is a lambda?<|im_end|>\n"
        "<|im_start|>assistant\nA function.<|im_end|>\n"
        "<|im_start|>user\nTell me more.<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(chat, tokenize=False) == expected
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == expected + "<|im_start|>assistant\n"
    assert tokenizer.encode(prompt).count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 5


def test_chat_template_takes_tools_documents_and_thinking(tokenizer: Tokenizer) -> None:
    function = {"name": "add", "parameters": {"type": "object"}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
        },
        {"role": "tool", "content": "2"},
    ]
    prompt = tokenizer.apply_chat_template(
        chat,
        tools=[{"type": "function", "function": function}],
        documents=[{"title": "a", "text": "b"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    assert prompt == (
        "<|im_start|>system\nBe brief.\n\nAnswer from these documents:\n<documents>\n"
        '{"title": "a", "text": "b"}\n</documents>\nFunctions to call:\n<tools>\n'
        f"{json.dumps(function)}\n</tools>\n"
        'Write a call as <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n\n<tool_call>\n"
        '{"name": "add", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@given(text=st.text())
def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ('The "with" statement is used to', "wrap the execution of a block"),
        ("Lambda expressions (sometimes called lambda forms) are used", "anonymous functions"),
        ('The "for" statement is used to iterate', "the elements of a sequence"),
    ],
)
def test_greedy_continuation_is_english(
    model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, words: str
) -> None:
    assert words in _greedy(model, tokenizer, tokenizer.encode(prompt), 40)


def test_chat_answers_end_and_the_second_turn_goes_on(
    model: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    chat = [{"role": "user", "content": "Explain the `with` statement."}]
    first = _answer(model, tokenizer, chat)
    assert first.startswith('The "with" statement is used to wrap the execution of a block')
    assert first.endswith("<|im_end|>")
    chat += [
        {"role": "assistant", "content": first.removesuffix("<|im_end|>")},
        {"role": "user", "content": "Tell me more."},
    ]
    second = _answer(model, tokenizer, chat)
    assert second.startswith("2. The context manager’s")
    assert second.endswith("<|im_end|>")


@pytest.mark.nightly
def test_greedy_choices_are_clear(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Over its own text the two likeliest tokens are never close to each other."""
    ids = torch.tensor([tokenizer.encode(_greedy_text(model, tokenizer))])
    with torch.inference_mode():
        best = model(ids).logits[0].topk(2).values  # [num_tokens, 2]
    margins = best[:, 0] - best[:, 1]
    assert margins.median() > 5
    assert margins.min() > 0.01


@pytest.mark.nightly
def test_positions_up_to_the_last_give_finite_logits(
    model: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(_greedy_text(model, tokenizer), verbose=False)
    long = torch.tensor([(ids * (4096 // len(ids) + 1))[:4096]])
    with torch.inference_mode():
        output = model(long, labels=long)
    assert torch.isfinite(output.logits).all()
    assert output.loss < 0.5


def _greedy(
    model: PreTrainedModel, tokenizer: Tokenizer, prompt: list[int], num_tokens: int
) -> str:
    """The text after the prompt, special tokens included."""
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(ids[0, len(prompt) :])


def _greedy_text(model: PreTrainedModel, tokenizer: Tokenizer) -> str:
    start = 'The "try" statement'
    return start + _greedy(model, tokenizer, tokenizer.encode(start), 300)


def _answer(model: PreTrainedModel, tokenizer: Tokenizer, chat: list[dict[str, str]]) -> str:
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return _greedy(model, tokenizer, tokenizer.encode(prompt), 300)
