"""A text's token ids, assembled from cached ids of its words; covers most prompts.

A byte-level BPE splits a text at its added tokens, then into words by a pattern, and encodes each
word separately, so a word has the same ids in every text. The table learns these ids from the
tokenizer; a lookup costs a quarter of an encoding. `PATTERNS` are those that checkpoints use;
`_for_python` translates them for `re`. The translation is exact for characters that every version
of Unicode classifies alike. A tokenizer with any other pattern has no table, and a text with other
characters goes to the tokenizer. The number of words is bounded.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Collection
from itertools import chain, islice
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC

from checkpoint.vocabularies.byte_alphabet import byte_alphabet
from gateway.text.character_classes import SPACES, character_classes

MAX_TEXT_CHARS = 8192
MAX_WORD_CHARS = 128
MAX_WORDS = 1 << 15
MAX_NEW_WORDS = 16
"""Up to this many unknown words of a text are looked up in the model; with more, the whole text is
encoded."""

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace("{1,3}", "")
PATTERNS = frozenset((_GPT_2, _LLAMA_3, _QWEN_2))
"""The word patterns of checkpoints, as they write them."""

_SAMPLE = (
    "I'll SAY \"it's\" 12345 times,\n\n  don't  you?!\n\t x=[1.5];\x00\x1c\x1f\x7f \r\n\f _a  "
)

_STAND_INS = {byte: character for character, byte in byte_alphabet().items()}
_find_seam = re.compile("[A-Za-z](?= [A-Za-z])").search
_SEARCH_CHARS = 1 << 16
"""A search holds the interpreter's lock, so a long text is searched in parts."""
_Ids = tuple[int, ...]


class WordTable:
    """The words of one tokenizer; see `make_word_table`. May be used from several threads."""

    def __init__(self, tokenizer: HfTokenizer, pattern: str) -> None:
        """`pattern` is one of `PATTERNS`."""
        self._model = tokenizer.model
        self._added = _added_tokens(tokenizer)
        self._find = re.compile(_for_python(pattern)).findall
        self._find_uncertain = re.compile(f"[^{character_classes().certain}]").search
        self._must_be_nfc = tokenizer.normalizer is not None
        self._cut = _cutter(self._added)
        self._has_seams = not any(" " in each for each in self._added)
        self._ids: dict[str, _Ids] = {}

    def can_encode(self, text: str) -> bool:
        """Whether the text is short and the table certainly splits it as the tokenizer does."""
        if len(text) > MAX_TEXT_CHARS:
            return False
        return text.isascii() or (
            self._find_uncertain(text) is None
            and (not self._must_be_nfc or unicodedata.is_normalized("NFC", text))
        )

    def try_encode(self, text: str) -> list[int] | None:
        """The text's token ids, without special tokens; None if the tokenizer is needed."""
        if not self.can_encode(text):
            return None
        known = self._ids  # entries are never removed; `_evict_oldest` replaces the dict
        found = map(known.__getitem__, self._words(text))
        ids: list[int] = []
        num_new = 0
        while True:
            try:
                ids.extend(chain.from_iterable(found))
                break
            except KeyError as unknown:
                # `ids` has the ids of the words before it; `found` continues after it
                (word,) = unknown.args
            num_new += 1
            if num_new > MAX_NEW_WORDS or len(word) > MAX_WORD_CHARS:
                return None
            known[word] = self._ids_of(word)
            ids += known[word]
        if num_new:
            self._evict_oldest()
        return ids

    def _ids_of(self, word: str) -> _Ids:
        """The ids of a word, from the model alone: a third of the cost of an encoding."""
        if word in self._added:
            return (self._added[word],)
        stand_ins = word.encode().decode("latin-1").translate(_STAND_INS)
        return tuple([token.id for token in self._model.tokenize(stand_ins)])

    def learn(self, text: str, encoding: Encoding) -> bool:
        """Learn the words of a text from its encoding. False, and nothing is learned, if the
        encoding splits the text into a different number of words."""
        words, groups = self._words(text), _by_word(encoding)
        if len(words) != len(groups):
            return False
        known = self._ids
        for word, ids in zip(words, groups, strict=True):
            if len(word) <= MAX_WORD_CHARS:
                known[word] = tuple(ids)
        self._evict_oldest()
        return True

    def seam(self, text: str, start: int) -> int | None:
        """A place at or after `start` where splitting the text in two leaves its token ids
        unchanged: the first one that this table recognizes. None if there is none. Such a place is
        a space between letters: all patterns begin a word there, and no normalizer joins the space
        to the text before it."""
        if not self._has_seams:
            return None
        for place in range(start, len(text), _SEARCH_CHARS):
            found = _find_seam(text, place, place + _SEARCH_CHARS + 2)  # two follow the letter
            if found is not None:
                return found.end()
        return None

    def _words(self, text: str) -> list[str]:
        """The words of a text; added tokens count as words."""
        if self._cut is None:
            return self._find(text)
        find, parts = self._find, iter(self._cut(text))
        words = find(next(parts))
        for added, part in zip(parts, parts, strict=True):
            words.append(added)
            words += find(part)
        return words

    def _evict_oldest(self) -> None:
        """Drop the oldest words, an eighth at once, so that a full table stays nearly full:
        emptying it would make the process's memory grow and shrink for hours."""
        if len(self._ids) > MAX_WORDS:
            words = self._ids.copy()  # no other thread adds to the copy
            num_gone = len(words) - MAX_WORDS * 7 // 8
            self._ids = dict(islice(words.items(), num_gone, None))


def make_word_table(tokenizer: HfTokenizer) -> WordTable | None:
    """A table for the tokenizer; None if the tokenizer might not encode word by word."""
    pattern = _pattern_of(tokenizer)
    if pattern is None or not _is_word_wise(tokenizer):
        return None
    table = WordTable(tokenizer, pattern)
    splits_alike = table.learn(_SAMPLE, tokenizer.encode(_SAMPLE, add_special_tokens=False))
    return table if splits_alike else None


def _is_word_wise(tokenizer: HfTokenizer) -> bool:
    """Whether only the pattern and plain added tokens determine the words, and only a word
    determines its ids."""
    model = tokenizer.model
    added = list(tokenizer.get_added_tokens_decoder().values())
    return (
        isinstance(model, BPE)
        and not model.dropout
        and (tokenizer.normalizer is None or isinstance(tokenizer.normalizer, NFC))
        and len({each.normalized for each in added}) <= 1
        and not any(each.single_word or each.lstrip or each.rstrip for each in added)
    )


def _pattern_of(tokenizer: HfTokenizer) -> str | None:
    """The tokenizer's word pattern, if it is in `PATTERNS`."""
    if tokenizer.pre_tokenizer is None:
        return None
    steps = json.loads(tokenizer.pre_tokenizer.__getstate__())
    steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    last = steps[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return _GPT_2 if last["use_regex"] else None
    if len(steps) > 2 or last["use_regex"]:
        return None
    return _pattern_of_split(steps[0])


def _pattern_of_split(step: dict[str, Any]) -> str | None:
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return None
    pattern = step["pattern"].get("Regex")
    return pattern if pattern in PATTERNS else None


def _for_python(pattern: str) -> str:
    """The pattern with all character classes written out."""
    classes = character_classes()
    for kind, content in (
        (r"[^\s\p{L}\p{N}]", f"[^{SPACES}{classes.letters}{classes.numbers}]"),
        (r"[^\r\n\p{L}\p{N}]", f"[^\r\n{classes.letters}{classes.numbers}]"),
        (r"\p{L}", f"[{classes.letters}]"),
        (r"\p{N}", f"[{classes.numbers}]"),
        (r"\s", f"[{SPACES}]"),
        (r"\S", f"[^{SPACES}]"),
    ):
        pattern = pattern.replace(kind, content)
    return pattern


def _cutter(added: Collection[str]) -> Callable[[str], list[Any]] | None:
    """A function that splits a text into alternating plain texts and added tokens. Of several
    added tokens that begin at one place, the longest counts."""
    if not added:
        return None
    longest_first = sorted(added, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})").split


def _added_tokens(tokenizer: HfTokenizer) -> dict[str, int]:
    """The ids of the added tokens by their texts."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: id_ for id_, token in added.items() if token.content}


def _by_word(encoding: Encoding) -> list[list[int]]:
    """The ids of each word; special tokens around the text belong to no word."""
    groups: list[list[int]] = []
    previous = None
    for token_id, word in zip(encoding.ids, encoding.word_ids, strict=True):
        if word is None:
            continue
        if word != previous:
            groups.append([])
            previous = word
        groups[-1].append(token_id)
    return groups
