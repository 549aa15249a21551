"""A GGUF file's vocabulary as the tokenizer.json and tokenizer_config.json that it was made from.

Two kinds exist: byte-level BPE (`gpt2`), whose way of splitting text has a name in the metadata,
and SentencePiece's BPE (`llama`), whose merges follow from its scores.
"""

from __future__ import annotations

from typing import Any

from checkpoint.gguf.configuration import special_id
from checkpoint.json_keys import JsonKeys
from checkpoint.vocabularies.bpe import byte_level, scored_pieces, whole_tokenizer
from checkpoint.vocabularies.splittings import SPLITTINGS, Splitting
from checkpoint.vocabularies.vocabulary import NORMAL, Vocabulary

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
        parts, adds_bos = _scored_pieces(keys, vocabulary, special.get("unk_token")), True
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
    """The special tokens by their names in tokenizer_config.json. Raises ModelLoadError."""
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
        found[name] = vocabulary.use_special(id_)
    return found


def _splitting(keys: JsonKeys) -> Splitting:
    name = keys.text("tokenizer.ggml.pre", "default")
    if name == "default":
        name = _BY_ARCHITECTURE.get(keys.text("general.architecture"), name)
    if name not in SPLITTINGS:
        raise keys.wrong("tokenizer.ggml.pre", f"one of {', '.join(SPLITTINGS)}")
    return SPLITTINGS[name]


def _scored_pieces(keys: JsonKeys, vocabulary: Vocabulary, unknown: str | None) -> dict[str, Any]:
    scores = keys.raw("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise keys.wrong("tokenizer.ggml.scores", f"an array of {len(vocabulary.tokens)} numbers")
    if not isinstance(scores[0], (int, float)):
        raise keys.wrong("tokenizer.ggml.scores", "an array of numbers")
    has_prefix = keys.flag("tokenizer.ggml.add_space_prefix", True)
    return scored_pieces(keys.where, vocabulary, scores, has_prefix, unknown)


def _pairs(keys: JsonKeys) -> list[tuple[str, ...]]:
    merges = keys.raw("tokenizer.ggml.merges")
    pairs = [tuple(each.split(" ", 2)) for each in merges] if _are_texts(merges) else []
    if len(pairs) < 1 or any(len(pair) != 2 for pair in pairs):
        raise keys.wrong("tokenizer.ggml.merges", "an array of pairs of tokens")
    return pairs


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
