"""Short answers that come again and again are encoded once, if the tokenizer chooses their ids."""

from __future__ import annotations

from itertools import product
from typing import Any

from gateway.history.answers import MOST_PLAIN, SHORT_TOKENS, AnswerScope, PromptText
from gateway.text.tokenizer import Tokenizer
from tests.unit.gateway.history.byte_answers import memory, single_bytes

PROMPT = PromptText("one", AnswerScope())


class CountingTokenizer:
    """A tokenizer that counts the answers that it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_encoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    async def encode_inside(self, text: str) -> list[int]:
        self.num_encoded += 1
        return await self._tokenizer.encode_inside(text)


async def test_an_answer_with_the_tokenizers_own_ids_is_encoded_once(tokenizer: Tokenizer) -> None:
    counting = CountingTokenizer(tokenizer)
    answers = memory(counting)  # type: ignore[arg-type]
    head, plain = [tokenizer.encode(text, False) for text in ("one", " two")]
    for _ in range(3):
        await answers.note(PROMPT, head, plain)
    assert counting.num_encoded == 1
    await answers.note(PROMPT, [*head, *head], plain)
    assert counting.num_encoded == 2, "another prompt may end in another way"


async def test_answers_with_other_ids_are_remembered_each_time(tokenizer: Tokenizer) -> None:
    counting = CountingTokenizer(tokenizer)
    answers = memory(counting)  # type: ignore[arg-type]
    head, other = tokenizer.encode("one", False), single_bytes(tokenizer, " two")
    assert len(other) <= SHORT_TOKENS
    for number in (1, 2):
        await answers.note(PROMPT, head, other)
        assert counting.num_encoded == number
    assert answers.remembered.num_bytes > 0


async def test_only_so_many_answers_are_known(tokenizer: Tokenizer) -> None:
    counting = CountingTokenizer(tokenizer)
    answers = memory(counting)  # type: ignore[arg-type]
    words = [tokenizer.encode(f" {word}", False) for word in ("one", "two", "three", "hello")]
    single = [ids[0] for ids in words if len(ids) == 1]
    texts = [(each[:7], each[7:]) for each in product(single, repeat=11)]
    for head, plain in texts[: MOST_PLAIN + 1]:
        await answers.note(PROMPT, head, plain)
    assert counting.num_encoded == MOST_PLAIN + 1
    await answers.note(PROMPT, *texts[MOST_PLAIN])
    assert counting.num_encoded == MOST_PLAIN + 1
    await answers.note(PROMPT, *texts[0])
    assert counting.num_encoded == MOST_PLAIN + 2, "the oldest was dropped"
