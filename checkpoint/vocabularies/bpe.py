"""A tokenizer.json of BPE, made of a vocabulary in another form.

Two kinds exist: byte-level BPE, which merges listed pairs in the words of a text, and
SentencePiece's, whose merges follow from the scores of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checkpoint.vocabularies.splittings import Splitting
from checkpoint.vocabularies.vocabulary import NORMAL, USER_DEFINED, Vocabulary
from protocol.errors import ModelLoadError

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_MAX_TOKEN_CHARS = 512
"""The longest SentencePiece token, because every way to cut a token in two is tried."""
MAX_MERGES = 1 << 21
"""Several times what a vocabulary of 256,000 tokens needs; each takes some 300 bytes here."""


def whole_tokenizer(
    vocabulary: Vocabulary, parts: dict[str, Any], special: dict[str, str], around: Sequence[str]
) -> dict[str, Any]:
    """The content of a tokenizer.json, of these parts. `special` are texts of special tokens by
    name; those named `around`, of bos_token and eos_token, are put around a text."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "post_processor": _template(
            {name: special[name] for name in around if name in special}, vocabulary
        ),
        **parts,
    }


def byte_level(
    splitting: Splitting, ids: dict[str, int], pairs: Sequence[tuple[str, ...]]
) -> dict[str, Any]:
    """The parts of a tokenizer.json of byte-level BPE, which merges `pairs` in their order."""
    coding = {"add_prefix_space": False, "trim_offsets": True}
    before: list[dict[str, Any]] = []
    if splitting.single_digits:
        before.append({"type": "Digits", "individual_digits": True})
    last = () if splitting.pattern is None else (splitting.pattern,)
    before += [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        for pattern in (*splitting.first, *last)
    ]
    before.append({"type": "ByteLevel", **coding, "use_regex": splitting.pattern is None})
    return {
        "normalizer": {"type": "NFC"} if splitting.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": before},
        "decoder": {"type": "ByteLevel", **coding, "use_regex": True},
        "model": _bpe(ids, list(pairs), unknown=None, ignore_merges=splitting.whole_words),
    }


def scored_pieces(
    where: str,
    vocabulary: Vocabulary,
    scores: Sequence[float],
    has_prefix: bool,
    unknown: str | None,
) -> dict[str, Any]:
    """The parts of a tokenizer.json of SentencePiece's BPE with byte fallback. With `has_prefix`, a
    text begins with a space. `unknown` is the text of the unknown token. Raises ModelLoadError,
    which names `where`."""
    normalizers: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    ]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary.ids(),
            _merges(where, vocabulary, scores),
            unknown=unknown,
            byte_fallback=True,
        ),
    }


def _merges(where: str, vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """All ways to make a token of two, the token with the highest score first: SentencePiece
    merges the neighbours whose token has the highest score, the leftmost of several. Among ways
    with the same score, a longer left part is further left: it was merged before."""
    ids = {
        token: id_
        for id_, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (NORMAL, USER_DEFINED)
    }
    found: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for token, id_ in ids.items():
        if len(token) > _MAX_TOKEN_CHARS:
            raise ModelLoadError(f"{where}: a token has more than {_MAX_TOKEN_CHARS} characters")
        if vocabulary.types[id_] != NORMAL:
            continue
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in ids and pair[1] in ids:
                found.append((-scores[id_], -cut, ids[pair[0]], ids[pair[1]], pair))
        if len(found) > MAX_MERGES:
            raise ModelLoadError(f"{where}: the tokens are made in more than {MAX_MERGES} ways")
    found.sort(key=lambda each: each[:4])
    return [pair for *_, pair in found]


def _template(used: dict[str, str], vocabulary: Vocabulary) -> dict[str, Any] | None:
    """The processor that puts special tokens around a text; None if there are none."""
    if not used:
        return None

    def around(names: str) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        for type_id, name in enumerate(names):
            for each in ("bos_token", name, "eos_token"):
                if each == name:
                    pieces.append({"Sequence": {"id": name, "type_id": type_id}})
                elif each in used:
                    pieces.append({"SpecialToken": {"id": used[each], "type_id": type_id}})
        return pieces

    ids = vocabulary.ids()
    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("AB"),
        "special_tokens": {
            text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in used.values()
        },
    }


def _bpe(
    ids: dict[str, int],
    merges: list[Any],
    unknown: str | None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": ids,
        "merges": merges,
    }
