"""Tokenizers from GGUF metadata against plain implementations of the two algorithms."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import regex

from bench.tools.gguf_conversion import finish
from checkpoint.gguf.header import read_header
from checkpoint.model_source import resolve_model
from gateway.text.tokenizer import Tokenizer
from tests.effort import times
from tests.gguf_files import smollm2, write_metadata

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PIECES = (
    "the ", "The", " capital", "don't we'll", "12345", " 3.14", "\n\n", "\t", "   ", " \r\n", "é",
    "naïve", "日本語", "한국어", "русский ", "😀", "👩‍👩‍👧", "\u200b", "\x00", "\x7f",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start", "def f(x):\n    return x",
    "{'a': [1, 2]}", "==",
    "https://x.y/z?a=b", "½", "٣", "\ufffd", "a\u0301", "I'M", "_snake_case", "CamelCase", "\\n",
)  # fmt: skip


def texts(count: int) -> list[str]:
    """Texts, code, emoji, white space, special tokens, and random characters of all planes."""
    chance = random.Random(7)
    found = []
    for number in range(count):
        if number % 4 == 3:
            ranges = ((0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x20000))
            found.append("".join(chr(chance.randrange(*chance.choice(ranges))) for _ in range(12)))
        elif number % 4 == 2:  # broken UTF-8, as a client's bytes are decoded
            found.append(chance.randbytes(16).decode(errors="replace"))
        else:
            found.append("".join(chance.choices(_PIECES, k=chance.randint(1, 12))))
    return found


def bytes_as_text(value: bytes) -> str:
    """GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return "".join(table[byte] for byte in value)


def merged(parts: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Neighbours merged, those with the lowest rank first, the left ones of several."""
    while True:
        ranks = [
            (found, place)
            for place in range(len(parts) - 1)
            if (found := rank(parts[place], parts[place + 1])) is not None
        ]
        if not ranks:
            return parts
        _, place = min(ranks)
        parts = [*parts[:place], parts[place] + parts[place + 1], *parts[place + 2 :]]


class ByteLevelBpe:
    """SmolLM2's way: special tokens, single digits, GPT-2's words, merges by rank."""

    def __init__(self, file: Path) -> None:
        metadata = read_header(file).metadata
        tokens = metadata["tokenizer.ggml.tokens"]
        types = metadata["tokenizer.ggml.token_type"]
        self._ids = {token: id_ for id_, token in enumerate(tokens)}
        merges = metadata["tokenizer.ggml.merges"]
        self._ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
        special.sort(key=len, reverse=True)
        self._special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for place, part in enumerate(self._special.split(text)):
            if place % 2:
                ids.append(self._ids[part])
                continue
            for piece in regex.split(r"(\p{N})", part):
                for word in regex.findall(_GPT2, piece):
                    # the vocabulary lacks some bytes, which Hugging Face's tokenizers drop
                    letters = [each for each in bytes_as_text(word.encode()) if each in self._ids]
                    found = merged(letters, lambda a, b: self._ranks.get((a, b)))
                    ids += [self._ids[each] for each in found]
        return ids

    def has_all_bytes_of(self, text: str) -> bool:
        return all(letter in self._ids for letter in bytes_as_text(text.encode()))


def test_smollm2_encodes_as_byte_level_bpe_does():
    file = smollm2()
    tokenizer, reference = Tokenizer(resolve_model(file)), ByteLevelBpe(file)
    num_whole = 0
    try:
        for text in texts(times(150, 10_000)):
            ids = tokenizer.encode(text, add_special_tokens=True)
            assert ids == reference.encode(text), text
            if reference.has_all_bytes_of(text):
                assert tokenizer.decode(ids, skip_special_tokens=False) == text
                num_whole += 1
        assert num_whole > times(150, 10_000) / 2
    finally:
        tokenizer.close()


@pytest.fixture(scope="module")
def sentence_pieces(tmp_path_factory) -> tuple[Path, dict[str, float]]:
    """A file with a vocabulary as SentencePiece makes: bytes, and pieces with their scores."""
    chance = random.Random(3)
    scores: dict[str, float] = dict.fromkeys("abcde▁", -100.0)
    for _ in range(60):
        first, second = chance.choices(list(scores), k=2)
        if len(first + second) <= 6:
            scores.setdefault(first + second, -float(len(scores)))
    shuffled = list(scores.items())  # the ids say nothing about which pair is merged first
    chance.shuffle(shuffled)
    scores = dict(shuffled)
    file = tmp_path_factory.mktemp("pieces") / "pieces.gguf"
    write_pieces(file, scores)
    return file, scores


def write_pieces(file: Path, scores: dict[str, float], chat_template: object = None) -> None:
    """A file with this vocabulary and no model."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scores]
    writer = gguf.GGUFWriter(file, "llama")
    config = {
        "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e4}, "vocab_size": 8,
    }  # fmt: skip
    writer.add_tokenizer_model("llama")
    writer.add_token_scores([0.0, 0.0, 0.0, *[0.0] * 256, *scores.values()])
    write_metadata(writer, "llama", config, has_tokens=False)
    writer.add_token_list(pieces)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(scores)])
    writer.add_unk_token_id(0)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.add_tensor("token_embd.weight", np.ones((len(pieces), 32), np.float32))
    finish(writer)


def test_sentence_pieces_merge_by_score(sentence_pieces, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file, scores = sentence_pieces
    ids = {piece: 259 + place for place, piece in enumerate(scores)}
    tokenizer, chance = Tokenizer(resolve_model(file)), random.Random(5)
    try:
        for _ in range(times(100, 3000)):
            text = "".join(chance.choices("abcde é", k=chance.randint(1, 14)))
            parts = merged(
                list("▁" + text.replace(" ", "▁")),
                lambda a, b: -scores[a + b] if a + b in scores else None,
            )
            expected = [1]
            for part in parts:
                known = [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
                expected += known
            assert tokenizer.encode(text, add_special_tokens=True) == expected, text
            assert tokenizer.decode(expected) == text
    finally:
        tokenizer.close()


def test_the_chat_template_and_the_special_tokens_come_along():
    tokenizer = Tokenizer(resolve_model(smollm2()))
    try:
        assert tokenizer.eos_id == 2
        assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
        assert tokenizer.chat_template is not None
        prompt = tokenizer.chat_template.render([{"role": "user", "content": "Hi"}])
        assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.encode("Hi", add_special_tokens=True) == [26843]
    finally:
        tokenizer.close()


@pytest.mark.parametrize(
    ("chat_template", "default", "for_tools"),
    [
        ("d", "d", "d"),
        ([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}], "d", "t"),
        ([{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}], "d", "d"),
    ],
)
def test_chat_templates_with_names_come_along(
    tmp_path, monkeypatch, chat_template, default, for_tools
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_pieces(tmp_path / "named.gguf", {"a": -1.0}, chat_template)
    tokenizer = Tokenizer(resolve_model(tmp_path / "named.gguf"))
    try:
        assert tokenizer.chat_template.render([]) == default
        assert tokenizer.tool_template.render([]) == for_tools
    finally:
        tokenizer.close()
