"""The served checkpoint's tokenizer: encodes text and creates detokenizers.

Reads `tokenizer.json` or another vocabulary in its place, `tokenizer_config.json`,
`chat_template.jinja` and the vocabulary size in `config.json`; no torch, no transformers. Rendering
and encoding long texts take milliseconds and more, so the work runs in a few threads that this
object owns (`close`), in fair turns of callers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from checkpoint.vocabularies.tokenizer_json import tokenizer_file, tokenizer_json_of
from gateway.text.checkpoint_texts import (
    TokenizerConfig,
    load_chat_templates,
    load_tokenizer_config,
    load_vocab_size,
)
from gateway.text.control_tokens import ControlTokens, is_control
from gateway.text.detokenizer import Detokenizer
from gateway.text.fair_threads import FairThreads, Steps, all_steps
from gateway.text.token_bytes import TokenBytes
from gateway.text.word_table import make_word_table
from http_kit.turnstile import Standing
from protocol.errors import InvalidRequest, ModelLoadError

_T = TypeVar("_T")
_NO_IDS: frozenset[int] = frozenset()
_PROBE = "a"
MAX_INLINE_CHARS = 1000
"""Encoding a text this short takes less time (0.2 ms) than waking a thread twice. If all words are
known, even `word_table.MAX_TEXT_CHARS` characters take at most half a millisecond."""


PIECE_CHARS = 1 << 16
"""Longer texts are encoded in pieces if the tokenizer's `WordTable` finds places to cut them."""
MAX_FREE_IDS = 1 << 15
"""Making a list of more ids holds the interpreter's lock for milliseconds. Threads that did so at
once would pass the lock to each other, past the event loop."""
DECODED_AT_ONCE = 1 << 14
ENCODE_S_PER_CHAR, CHECK_S_PER_BYTE = 5e-7, 1e-8
"""Estimates of how long jobs take."""
CHARS_PER_TOKEN = 8
"""Almost no text has more characters per token than this. So the first `most` times this many
characters show whether a text has more than `most` tokens."""


class Tokenizer:
    """Encodes prompts and creates detokenizers.

    `vocab_size` bounds the ids that a caller may name: one more than the largest id that both the
    tokenizer and the model know. If it `stays_in_vocabulary`, its own ids need no check.
    `special_ids` have no text unless requested; `chat_template` is None for checkpoints without
    one, and `tool_template` is the one for conversations with tools. `control_texts` are the texts
    of tokens that control the model. `added_ids` are tokens that no text around them changes.
    """

    def __init__(self, path: Path, threads: int = 2) -> None:
        """Load the files in the folder `path`. Raises ModelLoadError, which names the file."""
        config = load_tokenizer_config(path)
        self._tokenizer = _load(tokenizer_file(path))
        _add_configured_tokens(self._tokenizer, config)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._skipped: dict[frozenset[int], frozenset[int]] = {}  # by the ids that are kept
        self._added_ids = {token.content: id_ for id_, token in added.items()}
        self.added_ids = frozenset(added)
        self._added = ControlTokens(filter(None, self._added_ids))
        size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        model_size = load_vocab_size(path)
        self.vocab_size = size if model_size is None else min(size, model_size)
        self.stays_in_vocabulary = self.vocab_size == size
        self.special_tokens = config.special_tokens
        self.eos_id = self._token_id("eos_token")
        templates = load_chat_templates(path)
        self.chat_template, self.tool_template = templates.default, templates.for_tools
        named = {text for text in self.special_tokens.values() if is_control(text, True)}
        controls = {token.content for token in added.values() if _controls(token)}
        self.control_texts = frozenset(named | controls)
        self._add_bos = config.add_bos_token
        self._bos_id = self._token_id("bos_token")
        self._before, self._behind = _added_around(self._tokenizer)
        self._lead = _lead(self._tokenizer, added)
        self._token_bytes = TokenBytes(self._tokenizer)
        self._words = make_word_table(self._tokenizer)
        self._threads = FairThreads(threads, ENCODE_S_PER_CHAR, "tokenizer")
        self._answer_thread = FairThreads(1, ENCODE_S_PER_CHAR, "tokenizer-answer")
        self._long_list = threading.Lock()
        self._one_thread = FairThreads(1, CHECK_S_PER_BYTE, "tokenizer-one")

    def close(self) -> None:
        """Stop the threads after the encodings that are running."""
        self._threads.close()
        self._answer_thread.close()
        self._one_thread.close()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; special tokens are added as the checkpoint's settings say."""
        known = self._try_by_words(text, add_special_tokens)
        return self._by_tokenizer(text, add_special_tokens) if known is None else known

    def _try_by_words(self, text: str, add_special_tokens: bool) -> list[int] | None:
        ids = None if self._words is None else self._words.try_encode(text)
        if ids is None or not add_special_tokens:
            return ids
        return self._as_set([*self._before, *ids, *self._behind])

    def _by_tokenizer(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._words is not None and self._words.can_encode(text):
            with _PANICS_REFUSED:
                encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            self._words.learn(text, encoding)
        else:
            with _PANICS_REFUSED:
                (encoding,) = self._tokenizer.encode_batch_fast(  # no offsets: a fifth faster
                    [text], add_special_tokens=add_special_tokens
                )
        if len(encoding) <= MAX_FREE_IDS:
            ids = encoding.ids
        else:
            with self._long_list:
                ids = encoding.ids
        return self._as_set(ids) if add_special_tokens else ids

    def _as_set(self, ids: list[int]) -> list[int]:
        """Add or remove the BOS token if `add_bos_token` overrides the tokenizer's processor."""
        if self._add_bos is None or self._bos_id is None:
            return ids
        if self._add_bos and ids[:1] != [self._bos_id]:
            return [self._bos_id, *ids]
        if not self._add_bos and self._before[:1] == [self._bos_id]:
            return ids[1:]
        return ids

    def encode_parts(self, parts: Sequence[str], add_special_tokens: bool) -> list[int]:
        """Token ids of a text that comes in parts. No token spans two parts."""
        if len(parts) == 1:
            return self.encode(parts[0], add_special_tokens)
        ids = self.encode(parts[0], add_special_tokens=False)
        for part in parts[1:]:
            ids += self._encode_inner(part)
        if not add_special_tokens:
            return ids
        return self._as_set([*self._before, *ids, *self._behind])

    def encode_steps(self, parts: Sequence[str], add_special_tokens: bool) -> Steps[list[int]]:
        """`encode_parts`, a piece at a time if the tokenizer's words can be told apart."""
        if self._words is None or sum(map(len, parts)) <= PIECE_CHARS:
            return self.encode_parts(parts, add_special_tokens)
        ids: list[int] = []
        for place, part in enumerate(parts):
            for number, piece in enumerate(self._pieces(part)):
                is_inner = place > 0 and number == 0
                ids += self._encode_inner(piece) if is_inner else self.encode(piece, False)
                yield
        if not add_special_tokens:
            return ids
        return self._as_set([*self._before, *ids, *self._behind])

    def _pieces(self, text: str) -> Iterator[str]:
        """The text in pieces that can be encoded apart, each as short as its words allow."""
        start, seam = 0, None if self._words is None else self._words.seam(text, PIECE_CHARS)
        while self._words is not None and seam is not None:
            yield text[start:seam]
            start, seam = seam, self._words.seam(text, seam + PIECE_CHARS)
        yield text[start:]

    def _encode_inner(self, text: str) -> list[int]:
        """Token ids of a text that follows other text: some tokenizers put a space only before the
        first."""
        if self._lead is None:
            return self.encode(text, add_special_tokens=False)
        return self.encode(self._lead + text, add_special_tokens=False)[1:]

    async def encode_inside(self, text: str) -> list[int]:
        """Token ids of an answer inside another text; in a thread if it is long and unknown."""
        known = None if self._lead is not None else self._try_by_words(text, False)
        if known is not None:
            return known
        if len(text) <= MAX_INLINE_CHARS:
            return self._encode_inner(text)
        return await self.for_answer(lambda: self._encode_inner(text))

    def added_token_id(self, text: str) -> int | None:
        """Id of the added token (special or not) that stands for exactly this text."""
        return self._added_ids.get(text)

    async def encode_async(self, text: str, add_special_tokens: bool) -> list[int]:
        """Like `encode`, but in the thread pool if the text is long and has unknown words."""
        known = self._try_by_words(text, add_special_tokens)
        if known is not None:
            return known
        if len(text) <= MAX_INLINE_CHARS:
            return self._by_tokenizer(text, add_special_tokens)
        return await self._threads.run_steps(
            self.encode_steps([text], add_special_tokens), len(text)
        )

    def least_tokens(self, text: str, most: int) -> Steps[int]:
        """A lower bound on a text's tokens if its beginning alone has more than `most`, else 0.
        Only that beginning is encoded, even of a text that is far too long."""
        place = most * CHARS_PER_TOKEN
        if self._words is None or len(text) <= place:
            return 0
        seam = self._words.seam(text, place)
        if seam is None:
            return 0
        num_tokens = 0
        for piece in self._pieces(text[:seam]):
            num_tokens += len(self.encode(piece, add_special_tokens=False))
            if num_tokens > most:
                return num_tokens
            yield
        return 0

    async def off_loop(self, work: Callable[[], _T], num_chars: int) -> _T:
        """Run work on `num_chars` characters; in a thread if there are many."""
        if num_chars <= MAX_INLINE_CHARS:
            return work()
        return await self.in_thread(work, num_chars)

    async def in_thread(self, work: Callable[[], _T], num_chars: int = 0) -> _T:
        """Run work in a thread that would block the event loop, in a turn of its caller. Raises
        TooManyRequests if too much waits for the caller, and ClientGone."""
        return await self._threads.run(work, num_chars)

    async def in_steps(self, steps: Steps[_T], num_chars: int) -> _T:
        """`off_loop` for work that takes long: others have turns in between."""
        if num_chars <= MAX_INLINE_CHARS:
            return all_steps(steps)
        return await self._threads.run_steps(steps, num_chars)

    async def steps_in_thread(self, steps: Steps[_T], num_chars: int) -> _T:
        """`in_thread` for work that takes long."""
        return await self._threads.run_steps(steps, num_chars)

    async def for_answer(self, work: Callable[[], _T]) -> _T:
        """`in_thread` for a part of an answer, which is never refused, in a thread of its own: a
        client waits for its end, which long prompts of others must not delay."""
        return await self._answer_thread.run(work, 0, Standing.ANSWERING)

    def start_in_thread(self, work: Callable[[], None]) -> None:
        """Run work in a thread, without waiting for its result or for a turn."""
        self._threads.start(work)

    async def in_turn(self, work: Callable[[], _T], num_bytes: int = 0) -> _T:
        """Run work that holds the interpreter's lock for long, in a thread of its own. Two such
        jobs at once would pass the lock to each other, past the event loop. The loop starts a job
        only after it has seen the end of the one before, so that it has a turn of its own in
        between."""
        return await self._one_thread.run(work, num_bytes)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence."""
        detokenizer = self.detokenizer(skip_special_tokens, at_start=True)
        return "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])

    def decode_steps(self, token_ids: list[int], skip_special_tokens: bool = True) -> Steps[str]:
        """`decode`, some tokens at a time."""
        detokenizer = self.detokenizer(skip_special_tokens, at_start=True)
        parts: list[str] = []
        for start in range(0, len(token_ids), DECODED_AT_ONCE):
            parts += map(detokenizer.push, token_ids[start : start + DECODED_AT_ONCE])
            yield
        return "".join([*parts, detokenizer.flush()])

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        at_start: bool = False,
        kept_ids: frozenset[int] = _NO_IDS,
    ) -> Detokenizer:
        """A new incremental decoder; `at_start` if no prompt precedes the text.

        `kept_ids` have text even if they are special and special tokens are skipped.
        """
        skipped = self.special_ids if skip_special_tokens else _NO_IDS
        if kept_ids and skipped:
            skipped = self._skipped_beside(kept_ids)
        return Detokenizer(self._token_bytes, skipped, at_start)

    def _skipped_beside(self, kept_ids: frozenset[int]) -> frozenset[int]:
        """The special ids except `kept_ids`. A model's markup keeps one or two such sets."""
        skipped = self._skipped.get(kept_ids)
        if skipped is None:
            skipped = self._skipped[kept_ids] = self.special_ids - kept_ids
        return skipped

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token contributes to the text; not always whole characters."""
        return self._token_bytes.of(token_id)

    def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes that each token contributes to the text."""
        return self._token_bytes.pieces(token_ids)

    def added_places(self, text: str) -> list[int]:
        """The positions where added tokens begin in a text, in characters."""
        return self._added.places(text)

    def token_name(self, token_id: int) -> str:
        """The vocabulary's spelling of a token; empty for an id without one."""
        name: str | None = self._tokenizer.id_to_token(token_id)
        return name or ""

    def _token_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)


class _PanicsRefused:
    """Turns a panic of the tokenizer's library, which is a BaseException, into InvalidRequest. A
    checkpoint's pattern may give up on a text."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and kind.__name__ == "PanicException":
            raise InvalidRequest(f"the model's tokenizer cannot encode this text: {error}")


_PANICS_REFUSED = _PanicsRefused()


def _load(path: Path) -> HfTokenizer:
    content = tokenizer_json_of(path)
    try:
        tokenizer = HfTokenizer.from_str(content)
    except Exception as error:
        raise ModelLoadError(f"{path} cannot be read as a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _added_around(tokenizer: HfTokenizer) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer's own processor puts before and after a text."""
    ids = tokenizer.encode(_PROBE, add_special_tokens=True).ids
    text = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    for start in range(len(ids) - len(text) + 1):
        end = start + len(text)
        if ids[start:end] == text:
            return ids[:start], ids[end:]
    return [], []


def _controls(token: AddedToken) -> bool:
    return is_control(token.content, token.special)


def _lead(tokenizer: HfTokenizer, added: Mapping[int, AddedToken]) -> str | None:
    """The text of a token after which a text is encoded as if it followed other text; None if the
    text has the same ids on its own."""
    alone = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    for id_, token in added.items():
        if token.special and not token.rstrip:
            behind = tokenizer.encode(token.content + _PROBE, add_special_tokens=False).ids
            if behind[:1] == [id_]:
                return token.content if behind[1:] != alone else None
    return None


def _add_configured_tokens(tokenizer: HfTokenizer, config: TokenizerConfig) -> None:
    """Add the tokens that only `tokenizer_config.json` names, in the order of their ids."""
    for _, options in sorted(config.added_tokens.items()):
        token = AddedToken(**options)
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
