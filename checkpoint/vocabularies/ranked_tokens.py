"""Byte-level vocabularies that rank tokens: Mistral's `tekken.json` and Kimi's `tiktoken.model`.

A word that is a token is taken whole. In other words, neighbours are merged, first those that make
the token of the lowest rank. So every way to cut a token into two others is a merge, of the token's
rank. Definitions:
https://github.com/mistralai/mistral-common (`tekken`), https://github.com/openai/tiktoken.
"""

from __future__ import annotations

import binascii
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint.json_keys import JsonKeys, read_json_object
from checkpoint.regular_file import is_there, read_small
from checkpoint.vocabularies.bpe import MAX_MERGES, byte_level, whole_tokenizer
from checkpoint.vocabularies.byte_alphabet import byte_alphabet
from checkpoint.vocabularies.splittings import SPLITTINGS, Splitting
from checkpoint.vocabularies.vocabulary import CONTROL, NORMAL, USER_DEFINED, Vocabulary
from protocol.errors import ModelLoadError

_MAX_BYTES = 256 * 1024 * 1024
_MAX_TOKENS = 1 << 20
_MAX_TOKEN_BYTES = 512
TEKKEN_SPECIAL = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
"""The special tokens of `tekken.json`, by their names in tokenizer_config.json."""
_TEKKEN_CONTROLS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
"""The first tokens of files up to version 7, which do not list them."""
_KIMI = replace(SPLITTINGS["kimi-k2"], whole_words=True)
_KIMI_CLASS = "TikTokenTokenizer"
_LETTERS = {byte: letter for letter, byte in byte_alphabet().items()}


def tekken_tokenizer(file: Path) -> dict[str, Any]:
    """The content of a tokenizer.json for `tekken.json`: control tokens come first, then as many
    tokens as the vocabulary has room for. Raises ModelLoadError."""
    keys = JsonKeys(read_json_object(file, _MAX_BYTES), str(file))
    config = keys.table("config")
    if config is None:
        raise keys.wrong("config", "an object")
    num_controls = config.integer("default_num_special_tokens", maximum=_MAX_TOKENS)
    size = config.integer("default_vocab_size", minimum=num_controls + 1, maximum=_MAX_TOKENS)
    controls = _controls(keys)
    if len(controls) > num_controls:
        raise config.wrong("default_num_special_tokens", f"at least {len(controls)}")
    controls += [f"<SPECIAL_{place}>" for place in range(len(controls), num_controls)]
    ranked = [_decoded(each, keys) for each in _objects(keys, "vocab")[: size - num_controls]]
    splitting = Splitting(config.text("pattern"), whole_words=True)
    return _tokenizer(file, splitting, ranked, dict(enumerate(controls)), TEKKEN_SPECIAL)


def tiktoken_tokenizer(file: Path) -> dict[str, Any]:
    """The content of a tokenizer.json for Kimi's `tiktoken.model`. Control tokens, which
    `tokenizer_config.json` lists, follow the others; those that it leaves out are reserved. Raises
    ModelLoadError."""
    beside = file.with_name("tokenizer_config.json")
    keys = JsonKeys(read_json_object(beside) if is_there(beside) else {}, str(beside))
    if keys.text("tokenizer_class", None) != _KIMI_CLASS:
        raise keys.wrong("tokenizer_class", f"{_KIMI_CLASS} (Kimi's) beside {file.name}")
    ranked = _ranked_lines(file)
    listed = keys.table("added_tokens_decoder") or JsonKeys({}, keys.where)
    named: dict[int, str] = {}
    plain: set[int] = set()
    for id_ in listed.values:
        token = listed.table(id_) if id_.isascii() and id_.isdigit() and len(id_) < 8 else None
        if token is None or not len(ranked) <= int(id_) < _MAX_TOKENS:
            raise listed.wrong(id_, f"a token whose id is {len(ranked)} or more")
        named[int(id_)] = token.text("content")
        if not token.flag("special", False):
            plain.add(int(id_))
    first, end = len(ranked), 1 + max(named, default=len(ranked) - 1)
    controls = {id_: named.get(id_, f"<|reserved_token_{id_}|>") for id_ in range(first, end)}
    return _tokenizer(file, _KIMI, ranked, controls, {}, plain)


def _tokenizer(
    file: Path,
    splitting: Splitting,
    ranked: Sequence[bytes],
    controls: Mapping[int, str],
    around: Mapping[str, str],
    plain: Collection[int] = (),
) -> dict[str, Any]:
    """The ids of `ranked` tokens are those that `controls` do not have, in order; those of control
    tokens that are no special ones are `plain`. A text begins with the bos_token of `around`."""
    spelled = ["".join(map(_LETTERS.__getitem__, token)) for token in ranked]
    texts = [*controls.values(), *spelled]
    if len(set(texts)) < len(texts):
        raise ModelLoadError(f"{file}: two tokens of the vocabulary are equal")
    rest = iter(spelled)
    tokens = [controls[id_] if id_ in controls else next(rest) for id_ in range(len(texts))]
    types = [CONTROL if id_ in controls else NORMAL for id_ in range(len(texts))]
    for id_ in plain:
        types[id_] = USER_DEFINED
    vocabulary = Vocabulary(tokens, types)
    parts = byte_level(splitting, vocabulary.ids(), _merges(file, ranked, spelled))
    return whole_tokenizer(vocabulary, parts, dict(around), ("bos_token",))


def _merges(file: Path, ranked: Sequence[bytes], spelled: Sequence[str]) -> list[tuple[str, ...]]:
    """The merges by rank of the token that they make. The order of those that make the same token
    changes no text's tokens."""
    spellings = dict(zip(ranked, spelled, strict=True))
    found: list[tuple[str, ...]] = []
    for token in ranked:
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        found += [
            (spellings[a], spellings[b]) for a, b in cuts if a in spellings and b in spellings
        ]
        if len(found) > MAX_MERGES:
            raise ModelLoadError(f"{file}: the tokens are made in more than {MAX_MERGES} ways")
    return found


def _controls(keys: JsonKeys) -> list[str]:
    """The control tokens that the file lists, in the order of their ids."""
    if "special_tokens" not in keys:
        return list(_TEKKEN_CONTROLS)
    listed = _objects(keys, "special_tokens")
    by_rank = {each.integer("rank", minimum=0): each.text("token_str") for each in listed}
    if sorted(by_rank) != list(range(len(listed))):
        raise keys.wrong("special_tokens", "a list of tokens whose ranks are those from 0 on")
    return [by_rank[rank] for rank in range(len(listed))]


def _objects(keys: JsonKeys, key: str) -> list[JsonKeys]:
    found = keys.raw(key)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise keys.wrong(key, "a list of tokens")
    return [JsonKeys(each, f"{keys.where}: {key!r}") for each in found]


def _decoded(token: JsonKeys, keys: JsonKeys) -> bytes:
    try:
        return _checked(binascii.a2b_base64(token.text("token_bytes"), strict_mode=True))
    except ValueError:
        expected = f"1 to {_MAX_TOKEN_BYTES} bytes in base64"
        raise token.wrong("token_bytes", expected) from None


def _ranked_lines(file: Path) -> list[bytes]:
    """The tokens of a file with one on each line, in base64, and its rank behind it."""
    ranked: list[bytes] = []
    for number, line in enumerate(read_small(file, _MAX_BYTES).splitlines()):
        try:
            token, rank = line.split()
            ranked.append(_checked(binascii.a2b_base64(token, strict_mode=True)))
            if int(rank) != number or number >= _MAX_TOKENS:
                raise ValueError
        except ValueError:
            raise ModelLoadError(
                f"{file}: line {number + 1} must be a token in base64 and its rank, {number}"
            ) from None
    return ranked


def _checked(token: bytes) -> bytes:
    """Raises ValueError for a token that is empty or too long."""
    if not 0 < len(token) <= _MAX_TOKEN_BYTES:
        raise ValueError
    return token
