"""Vocabularies of checkpoints without a tokenizer.json, against their definitions: merge the
neighbours that make the best token, the leftmost first."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer as HfTokenizer
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece

from checkpoint.texts_fingerprint import texts_fingerprint
from checkpoint.vocabularies.tokenizer_json import tokenizer_file, tokenizer_json_of
from engine.sampling.grammar import Grammars
from gateway.grammars.grammar_checker import GrammarChecker
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ModelLoadError
from tests.effort import times

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = "ab c\n1é日aa  "


def random_texts() -> list[str]:
    generator = random.Random(3)
    lengths = [generator.randrange(1, 30) for _ in range(times(everyday=200, nightly=5000))]
    runs = [f"b{' ' * length}a" for length in range(1, 30)]
    return [*runs, *("".join(generator.choices(LETTERS, k=length)) for length in lengths)]


def ranked_tokens() -> list[bytes]:
    """All bytes, then tokens of two earlier ones, some of which are made in several ways."""
    generator = random.Random(5)
    found = [bytes([byte]) for byte in range(256)]
    letters = [letter.encode() for letter in LETTERS if letter.isascii()]
    while len(found) < 330:
        token = b"".join(generator.choices([*letters, *found[256:]], k=2))
        if token not in found and len(token) < 9:
            found.append(token)
    return [*found, "é".encode(), "日".encode()]


RANKED = ranked_tokens()


def merged(parts: list[Any], best: Callable[[Any], float | None]) -> list[Any]:
    """Merge neighbours until none make a token, each time those for which `best` is least."""
    while True:
        pairs = [(best(a + b), place) for place, (a, b) in enumerate(pairwise(parts))]
        able = [(rank, place) for rank, place in pairs if rank is not None]
        if not able:
            return parts
        _, place = min(able)
        parts = [*parts[:place], parts[place] + parts[place + 1], *parts[place + 2 :]]


def by_rank(text: str, pattern: str, first_id: int, ranked: Sequence[bytes] = RANKED) -> list[int]:
    ranks = {token: rank for rank, token in enumerate(ranked)}
    ids = []
    for word in regex.findall(pattern, text, flags=regex.V1):
        is_token = word.encode() in ranks
        single = [bytes([byte]) for byte in word.encode()]
        parts = [word.encode()] if is_token else merged(single, ranks.get)
        ids += [first_id + ranks[part] for part in parts]
    return ids


def in_base64(token: bytes) -> str:
    return base64.b64encode(token).decode()


def tekken(**changes: Any) -> dict[str, Any]:
    """As Mistral's, whose files have more tokens than the vocabulary has room for."""
    controls = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
    vocab = [
        {"rank": i, "token_bytes": in_base64(t), "token_str": None} for i, t in enumerate(RANKED)
    ]
    return {
        "config": {
            "pattern": PATTERN, "num_vocab_tokens": 400, "default_num_special_tokens": 10,
            "default_vocab_size": 10 + len(RANKED), "version": "v7",
        },
        "vocab": [*vocab, {"rank": 999, "token_bytes": in_base64(b"padding"), "token_str": None}],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in reversed(list(enumerate(controls)))
        ],
    } | changes  # fmt: skip


def made(folder: Path) -> HfTokenizer:
    return HfTokenizer.from_str(tokenizer_json_of(tokenizer_file(folder)))


def test_tekken_merges_by_rank(tmp_path):
    (tmp_path / "tekken.json").write_text(json.dumps(tekken()))
    tokenizer = made(tmp_path)
    assert tokenizer.get_vocab_size() == 10 + len(RANKED)
    for text in random_texts():
        assert tokenizer.encode(text).ids == [1, *by_rank(text, PATTERN, 10)]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    controls = tokenizer.encode("[INST]a[/INST]<SPECIAL_7>", add_special_tokens=False).ids
    assert controls == [3, 10 + ord("a"), 4, 7]


def test_ways_to_make_the_same_token_may_come_in_any_order(tmp_path):
    """Vocabularies of two letters, in which most tokens are made in several ways that overlap."""
    generator = random.Random(11)
    for _ in range(times(everyday=30, nightly=1000)):
        made_of = [b"a", b"b"]
        for _ in range(40):
            token = b"".join(generator.choices(made_of, k=2))
            if token not in made_of and len(token) < 9:
                made_of.append(token)
        longer = generator.sample(made_of[2:], len(made_of) - 2)
        ranked = [*(bytes([byte]) for byte in range(256)), *longer]
        vocab = [{"token_bytes": in_base64(token)} for token in ranked]
        content = tekken(vocab=vocab)
        content["config"]["default_vocab_size"] = 10 + len(ranked)
        (tmp_path / "tekken.json").write_text(json.dumps(content))
        tokenizer = made(tmp_path)
        for _ in range(40):
            text = "".join(generator.choices("ab", k=generator.randrange(2, 40)))
            assert tokenizer.encode(text).ids == [1, *by_rank(text, PATTERN, 10, ranked)]


def test_older_tekken_lists_no_control_tokens(tmp_path):
    older = tekken(special_tokens=None)
    older["config"] |= {"default_num_special_tokens": 30, "default_vocab_size": 30 + len(RANKED)}
    (tmp_path / "tekken.json").write_text(json.dumps(older))
    tokenizer = made(tmp_path)
    assert [tokenizer.token_to_id(each) for each in ("[TOOL_CALLS]", "[SUFFIX]", "a")] == [
        9, 16, 30 + ord("a"),
    ]  # fmt: skip


def test_a_folder_with_tekken_alone_is_served(tmp_path):
    """Its special tokens need no tokenizer_config.json; grammars know the vocabulary."""
    (tmp_path / "tekken.json").write_text(json.dumps(tekken()))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0].content }}")
    tokenizer = Tokenizer(tmp_path)
    try:
        assert tokenizer.eos_id == 2
        assert tokenizer.chat_template is not None
        assert tokenizer.chat_template.render([{"content": "ab"}]) == "<s>[INST]ab"
        assert tokenizer.encode("a", add_special_tokens=True) == [1, 10 + ord("a")]
        assert {"<s>", "[INST]", "[TOOL_CALLS]"} <= tokenizer.control_texts
        assert GrammarChecker(tmp_path, tokenizer)._vocabulary is not None
    finally:
        tokenizer.close()
    grammars = Grammars(tokenizer_file(tmp_path), 10 + len(RANKED), (2,))
    assert grammars.unavailable == ""
    grammars.close()
    (tmp_path / "config.json").write_text("{}")
    first = texts_fingerprint(tmp_path)
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(vocab=tekken()["vocab"][:-1])))
    assert len({"", first, texts_fingerprint(tmp_path)}) == 3


KIMI = (
    r"\p{Han}+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Without the parts that no text here has."""
FIRST = len(RANKED)


def kimi(folder: Path, lines: Sequence[str] | None = None, **changes: Any) -> None:
    if lines is None:
        lines = [f"{in_base64(token)} {rank}" for rank, token in enumerate(RANKED)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {
        str(FIRST + place): {"content": text, "special": is_special}
        for place, text, is_special in (
            (0, "[BOS]", True), (1, "[EOS]", True), (4, "<|im_end|>", True),
            (6, "<|tool_call_begin|>", False),
        )
    }  # fmt: skip
    config = {
        "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
        "added_tokens_decoder": added,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))


def test_kimi_s_vocabulary_merges_by_rank(tmp_path):
    kimi(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    try:
        for text in random_texts():
            ids = tokenizer.encode(text, add_special_tokens=True)
            assert ids == by_rank(text, KIMI, 0)
            assert tokenizer.decode(ids) == text
        text = f"[BOS]a<|im_end|><|tool_call_begin|><|reserved_token_{FIRST + 5}|>"
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [FIRST, ord("a"), FIRST + 4, FIRST + 6, FIRST + 5]
        assert tokenizer.decode(ids) == "a<|tool_call_begin|>"
        assert tokenizer.eos_id == FIRST + 1
    finally:
        tokenizer.close()


PIECES = [
    ("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    ("▁a", -1.0, 1), *(("▁" * size, -9.0, 1) for size in (2, 3, 4, 5, 6, 8)), ("aa", -2.0, 1),
    ("aaa", -3.0, 1), ("bc", -4.0, 1), ("abc", -5.0, 1), ("▁ab", -6.0, 1),
    *((letter, -50.0 - place, 1) for place, letter in enumerate("▁abc1")),
]  # fmt: skip


def sentence_piece(folder: Path, trainer: dict[str, Any], normalizer: dict[str, Any]) -> None:
    model = sentencepiece.ModelProto()
    for text, score, kind in PIECES:
        model.pieces.add(piece=text, score=score, type=kind)
    for field, value in {"model_type": 2, "byte_fallback": True, "pad_id": -1, **trainer}.items():
        setattr(model.trainer_spec, field, value)
    usual = {"add_dummy_prefix": True, "remove_extra_whitespaces": False}
    for field, value in (usual | normalizer).items():
        setattr(model.normalizer_spec, field, value)
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentence_pieces_merge_by_score_and_from_the_left(tmp_path, has_prefix):
    sentence_piece(tmp_path, {}, {"add_dummy_prefix": has_prefix})
    tokenizer = made(tmp_path)
    ids = {text: id_ for id_, (text, _, _) in enumerate(PIECES)}
    scores = {text: -score for text, score, kind in PIECES if kind == 1}
    for text in random_texts():
        parts = merged(list(("▁" * has_prefix) + text.replace(" ", "▁")), scores.get)
        expected = [1]
        for part in parts:
            known = [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
            expected += known
        assert tokenizer.encode(text).ids == expected
        assert tokenizer.decode(expected) == text


@pytest.mark.parametrize(
    ("trainer", "normalizer", "message"),
    [
        ({"model_type": 1}, {}, "tokenizer.model: the model must be BPE with byte fallback"),
        ({"byte_fallback": False}, {}, "the model must be BPE with byte fallback"),
        ({}, {"remove_extra_whitespaces": True}, "a model that normalizes texts is not supported"),
        ({}, {"precompiled_charsmap": b"x"}, "a model that normalizes texts is not supported"),
    ],
)
def test_other_models_of_sentence_piece_are_refused(tmp_path, trainer, normalizer, message):
    sentence_piece(tmp_path, trainer, normalizer)
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tekken.json", "[]", "tekken.json must hold a JSON object"),
        ("tekken.json", "{}", "'config' must be an object, not null"),
        ("tekken.json", json.dumps(tekken(vocab=[1])), "'vocab' must be a list of tokens"),
        (
            "tekken.json",
            json.dumps(tekken(vocab=[{"token_bytes": "?"}])),
            "'token_bytes' must be 1 to 512 bytes in base64, not",
        ),
        (
            "tekken.json",
            json.dumps(tekken(vocab=2 * [{"token_bytes": "YQ=="}])),
            "tekken.json: two tokens of the vocabulary are equal",
        ),
        (
            "tekken.json",
            json.dumps(tekken(special_tokens=[{"rank": 1, "token_str": "x"}])),
            "'special_tokens' must be a list of tokens whose ranks are those from 0 on",
        ),
        ("tokenizer.model", "{}", "tokenizer.model is not a model of SentencePiece"),
        ("tokenizer.model", "\x0a\x7f", "tokenizer.model is not a model of SentencePiece"),
        ("tokenizer.model", "\x12\x03\x1a\x01x", "tokenizer.model is not a model of SentencePiece"),
        ("tiktoken.model", "YQ== 0", "'tokenizer_class' must be TikTokenTokenizer .* not null"),
    ],
)
def test_a_wrong_vocabulary_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("lines", "changes", "message"),
    [
        (["YQ== 0", "Yg== 2"], {}, "line 2 must be a token in base64 and its rank, 1"),
        (["YQ== 0", "Yg=="], {}, "line 2 must be a token in base64 and its rank, 1"),
        (["? 0"], {}, "line 1 must be a token in base64 and its rank, 0"),
        (None, {"added_tokens_decoder": {"3": {"content": "x"}}}, "'3' must be a token whose id"),
    ],
)
def test_a_wrong_line_of_kimi_s_is_named(tmp_path, lines, changes, message):
    kimi(tmp_path, lines, **changes)
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer(tmp_path)


def test_a_usual_tokenizer_comes_first(tmp_path):
    assert tokenizer_file(tmp_path).name == "tokenizer.json"
    for name in ("tokenizer.model", "tiktoken.model", "tekken.json", "tokenizer.json"):
        (tmp_path / name).write_text("")
        assert tokenizer_file(tmp_path).name == name
