"""A GGUF file's vocabulary as the tokenizer.json and tokenizer_config.json that it was made from.

Two kinds exist: byte-level BPE (`gpt2`), whose way of splitting text has a name in the metadata,
and SentencePiece's BPE (`llama`), whose merges follow from its scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from checkpoint.gguf.configuration import special_id
from checkpoint.json_keys import JsonKeys

NORMAL, _UNKNOWN, CONTROL, USER_DEFINED, _UNUSED = range(1, 6)
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_MAX_TOKEN_CHARS = 512
"""The longest SentencePiece token, because every way to cut a token in two is tried."""
MAX_MERGES = 1 << 21
"""Several times what a vocabulary of 256,000 tokens needs; each takes some 300 bytes here."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True)
class Splitting:
    """How a text is split before pairs are merged: by each of `first`, then by `pattern`, which is
    None for GPT-2's own."""

    pattern: str | None
    first: tuple[str, ...] = ()
    single_digits: bool = False
    whole_words: bool = False  # a word that is a token is taken whole, without merging
    composes: bool = False  # Unicode's NFC first
    adds_bos: bool = False  # used if the metadata does not say


_LLAMA3 = Splitting(
    rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", whole_words=True, adds_bos=True
)
_QWEN2 = Splitting(rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}|{_REST}", composes=True)
_QWEN35 = Splitting(
    rf"{_CONTRACTIONS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    composes=True,
)
_TEKKEN = Splitting(
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    adds_bos=True,
)
_DEEPSEEK_LLM = Splitting(
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    first=(
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
    ),
    single_digits=True,
    adds_bos=True,
)
_DEEPSEEK_V3 = Splitting(
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    first=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    adds_bos=True,
)
_GPT_4O = Splitting(
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NO_HAN = r"&&[^\p{Han}]]"
_KIMI_UPPER, _KIMI_LOWER = _UPPER[:-1] + _NO_HAN, _LOWER[:-1] + _NO_HAN
_KIMI_K2 = Splitting(
    rf"\p{{Han}}+|{_BEFORE}{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTIONS}?"
    rf"|{_BEFORE}{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST}"
)
SPLITTINGS = {
    "gpt-2": Splitting(None),
    "smollm": Splitting(None, single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "pixtral": _LLAMA3,
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "deepseek-r1-qwen": Splitting(_QWEN2.pattern, adds_bos=True),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT_4O,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": _KIMI_K2,
}
"""How texts are split, for each value of `tokenizer.ggml.pre`."""
_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
"""The keys of tokenizer_config.json, and what GGUF's keys call the same tokens."""
_CHAT_TEMPLATE = "tokenizer.chat_template"
_BY_ARCHITECTURE = {"qwen2": "qwen2", "qwen2moe": "qwen2", "qwen3": "qwen2"}
"""For files that are older than the key `unknown_token_id`."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens by id, and the type of each, as SentencePiece and GGUF number them."""

    tokens: list[str]
    types: list[int]

    def ids(self) -> dict[str, int]:
        """The ids of tokens by text, without those that only fill up the vocabulary."""
        pairs = enumerate(zip(self.tokens, self.types, strict=True))
        return {token: id_ for id_, (token, kind) in pairs if kind != _UNUSED}

    def added(self) -> list[dict[str, Any]]:
        """The tokens that are found in a text before it is split, in tokenizer.json's form."""
        return [
            {
                "id": id_,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }
            for id_, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_UNKNOWN, CONTROL, USER_DEFINED) and token
        ]


def tokenizer_files(keys: JsonKeys) -> dict[str, dict[str, Any]]:
    """The contents of tokenizer.json and tokenizer_config.json, by their names. Raises
    ModelLoadError, which names the file and the key."""
    kind = keys.text("tokenizer.ggml.model")
    vocabulary = _vocabulary(keys)
    special = _special_tokens(keys, vocabulary)
    if kind == "gpt2":
        splitting = _splitting(keys)
        parts = byte_level(splitting, vocabulary.ids(), _pairs(keys))
        adds_bos = splitting.adds_bos
    elif kind == "llama":
        parts, adds_bos = _sentence_piece(keys, vocabulary, special.get("unk_token")), True
    else:
        raise keys.wrong("tokenizer.ggml.model", "gpt2 or llama, which are supported")
    around = {
        "bos_token": keys.flag("tokenizer.ggml.add_bos_token", adds_bos),
        "eos_token": keys.flag("tokenizer.ggml.add_eos_token", False),
    }
    names = [name for name, is_wanted in around.items() if is_wanted]
    tokenizer = whole_tokenizer(vocabulary, parts, special, names)
    config: dict[str, Any] = dict(special)
    templates = _chat_templates(keys)
    if templates:
        config["chat_template"] = templates
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


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


def _chat_templates(keys: JsonKeys) -> list[dict[str, str]]:
    """The default chat template, and those that have names."""
    names = {_CHAT_TEMPLATE: "default"} | {
        key: key.removeprefix(f"{_CHAT_TEMPLATE}.")
        for key in keys.values
        if key.startswith(f"{_CHAT_TEMPLATE}.")
    }
    return [
        {"name": name, "template": keys.text(key)} for key, name in names.items() if key in keys
    ]


def _vocabulary(keys: JsonKeys) -> Vocabulary:
    tokens = keys.raw("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise keys.wrong("tokenizer.ggml.tokens", "an array of strings")
    types = keys.raw("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise keys.wrong("tokenizer.ggml.token_type", f"an array of {len(tokens)} numbers")
    if not _are_texts(tokens) or len(set(tokens)) < len(tokens):
        raise keys.wrong("tokenizer.ggml.tokens", "strings of which no two are equal")
    return Vocabulary(tokens, list(types))


def _special_tokens(keys: JsonKeys, vocabulary: Vocabulary) -> dict[str, str]:
    """The special tokens by their names in tokenizer_config.json. Such a token is in use, even if
    its type says otherwise. Raises ModelLoadError."""
    found = {}
    for name, kind in _SPECIAL.items():
        id_ = special_id(keys, kind)
        if id_ is None:
            continue
        if id_ >= len(vocabulary.tokens):
            raise keys.wrong(
                f"tokenizer.ggml.{kind}_token_id",
                f"below the number of tokens ({len(vocabulary.tokens)})",
            )
        if vocabulary.types[id_] == _UNUSED:
            vocabulary.types[id_] = CONTROL
        found[name] = vocabulary.tokens[id_]
    return found


def _splitting(keys: JsonKeys) -> Splitting:
    name = keys.text("tokenizer.ggml.pre", "default")
    if name == "default":
        name = _BY_ARCHITECTURE.get(keys.text("general.architecture"), name)
    if name not in SPLITTINGS:
        raise keys.wrong("tokenizer.ggml.pre", f"one of {', '.join(SPLITTINGS)}")
    return SPLITTINGS[name]


def _pairs(keys: JsonKeys) -> list[tuple[str, ...]]:
    merges = keys.raw("tokenizer.ggml.merges")
    pairs = [tuple(each.split(" ", 2)) for each in merges] if _are_texts(merges) else []
    if len(pairs) < 1 or any(len(pair) != 2 for pair in pairs):
        raise keys.wrong("tokenizer.ggml.merges", "an array of pairs of tokens")
    return pairs


def byte_level(
    splitting: Splitting, ids: dict[str, int], pairs: Sequence[tuple[str, ...]]
) -> dict[str, Any]:
    """The parts of a tokenizer.json of byte-level BPE, which merges `pairs` in their order."""
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
    before.append({"type": "ByteLevel", **_BYTES, "use_regex": splitting.pattern is None})
    return {
        "normalizer": {"type": "NFC"} if splitting.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": before},
        "decoder": {"type": "ByteLevel", **_BYTES, "use_regex": True},
        "model": _bpe(ids, list(pairs), unknown=None, ignore_merges=splitting.whole_words),
    }


_BYTES = {"add_prefix_space": False, "trim_offsets": True}


def _sentence_piece(keys: JsonKeys, vocabulary: Vocabulary, unknown: str | None) -> dict[str, Any]:
    scores = keys.raw("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise keys.wrong("tokenizer.ggml.scores", f"an array of {len(vocabulary.tokens)} numbers")
    if not isinstance(scores[0], (int, float)):
        raise keys.wrong("tokenizer.ggml.scores", "an array of numbers")
    has_prefix = keys.flag("tokenizer.ggml.add_space_prefix", True)
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
            _merges(keys, vocabulary, scores),
            unknown=unknown,
            byte_fallback=True,
        ),
    }


def _merges(keys: JsonKeys, vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
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
            raise keys.wrong("tokenizer.ggml.tokens", f"tokens of at most {_MAX_TOKEN_CHARS} chars")
        if vocabulary.types[id_] != NORMAL:
            continue
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in ids and pair[1] in ids:
                found.append((-scores[id_], -cut, ids[pair[0]], ids[pair[1]], pair))
        if len(found) > MAX_MERGES:
            raise keys.wrong(
                "tokenizer.ggml.tokens", f"tokens that are made in at most {MAX_MERGES} ways"
            )
    found.sort(key=lambda each: each[:4])
    return [pair for *_, pair in found]


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


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
