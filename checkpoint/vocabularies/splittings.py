"""How byte-level BPE splits a text into words, by the names that GGUF files give it."""

from __future__ import annotations

from dataclasses import dataclass

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
