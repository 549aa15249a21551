"""The router's memory of answers: notes the ids of each, and puts them into the next prompt.

A model may write a text with other tokens than its tokenizer would. The next turn's prompt then
repeats the text, but not the tokens, and no cached block of the answer serves it. So an answer
whose ids the tokenizer would not choose is remembered. In prompts that begin with the same text as
its own prompt and the answer, its ids replace those of its text. The text of a prompt never
changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.history.encoded_text import SPACES, cuts_between, spliced, try_make
from gateway.history.remembered import Remembered
from gateway.history.seal import Seal
from gateway.text.tokenizer import Tokenizer
from protocol.errors import InvalidRequest

MAX_INLINE_CHARS = 16_384
"""Texts up to this length are searched on the event loop, in half a millisecond; longer ones in a
thread."""
HEAD_TOKENS = 8
"""Tokens before an answer that are remembered with it, or fewer if a control token comes sooner:
the end of a text may be encoded in another way once more text follows."""
MAX_ANSWER_TOKENS = 1 << 16
NEWEST_PLACES = 8
"""The last places of a prompt, at which the next turn asks the store again if it had no answer
there: the router that gave the newest answer may still be writing it."""
SHORT_TOKENS = 8
MOST_PLAIN = 1024
"""Short answers, such as a label, come again and again. So many of those with the tokenizer's own
ids are known, and are not encoded again."""
_ID_TYPE = "I"
_SPACES = SPACES.decode()
_T = TypeVar("_T")


class AnswerScope(msgspec.Struct, frozen=True):
    """The scope in which answers are remembered and found: `salt` is the salt of the prompt's
    cached blocks, `owner` its part that stands for the tenant.

    - `is_conversation`: control tokens end the answers in the prompt.
    - `may_leave`: the answers may be remembered outside of this process, too.
    - `restores`: False for a prompt that is encoded for the second time, and had no such answers.
    - `is_resumed`: the prompt is encoded for the second time, and had such answers.
    """

    salt: str = ""
    owner: str = ""
    is_conversation: bool = False
    may_leave: bool = True
    restores: bool = True
    is_resumed: bool = False


class PromptText(msgspec.Struct, frozen=True):
    """A prompt's text as it was encoded. `is_restored`: some ids come from remembered answers."""

    text: str
    scope: AnswerScope = AnswerScope()
    is_restored: bool = False


class AnswerStore(Protocol):
    """A store in which all routers of a cluster find answers. No call fails."""

    @property
    def asks(self) -> bool:
        """Whether the store may have answers that this router has not remembered itself."""
        ...

    async def find(self, scope: AnswerScope, names: Sequence[bytes]) -> list[bytes | None]:
        """The packed ids of each answer; empty if the store has none, None if it did not say."""
        ...

    def put(self, scope: AnswerScope, name: bytes, ids: bytes) -> None:
        """Write an answer in the background."""
        ...


class AnswerMetrics:
    """Counters of the memory of answers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.remembered = Counter(
            "baton_answers_remembered",
            "Answers whose token ids were remembered, because the tokenizer would choose others",
            registry=registry,
        )
        self.restored = Counter(
            "baton_answers_restored",
            "Answers in later prompts that got the ids with which they were generated",
            registry=registry,
        )
        self.num_bytes = Gauge(
            "baton_answers_bytes", "Memory of the router's remembered answers", registry=registry
        )


@dataclass(frozen=True, slots=True)
class AnswerMemory:
    """Remembers answers in this process, and in a store if there is one."""

    tokenizer: Tokenizer
    seal: Seal
    remembered: Remembered
    metrics: AnswerMetrics
    store: AnswerStore | None = None
    _plain: dict[tuple[int, ...], None] = field(default_factory=dict)

    # -- a prompt arrives -------------------------------------------------------------------------

    async def restored(self, prompt: PromptText, parts: Sequence[str], ids: list[int]) -> list[int]:
        """The ids of a prompt in `parts`, with the ids of remembered answers in it. Returns the
        same list if there are none."""
        if not (prompt.scope.restores and self._may_know(prompt.scope, ids)):
            return ids
        answers = await self._known(prompt)
        if not answers:
            return ids

        def splice() -> tuple[list[int], int]:
            pieces = self.tokenizer.pieces
            encoded = try_make(prompt.text, ids, pieces)
            if encoded is None:
                return ids, 0
            cuts = frozenset(cuts_between(parts)) if len(parts) > 1 else ()
            return spliced(encoded, answers, pieces, cuts)

        whole, num_found = await self._off_loop(splice, len(prompt.text))
        self.metrics.restored.inc(num_found)
        return whole if num_found else ids

    def _may_know(self, scope: AnswerScope, ids: Sequence[int]) -> bool:
        """Whether an answer of this owner may be in the prompt; quick."""
        if self.remembered.has(scope.owner):
            return True
        if self.store is None or not self.store.asks:
            return False
        return scope.is_conversation or not self.tokenizer.added_ids.isdisjoint(ids)

    async def _known(self, prompt: PromptText) -> list[tuple[int, Sequence[int]]]:
        """The remembered answers in the prompt, from here or the store: where each ends, in bytes,
        and its ids."""
        text, scope = prompt.text, prompt.scope
        lengths = [] if scope.is_conversation else self.remembered.lengths(scope.owner)

        def name() -> tuple[list[int], list[bytes]]:
            places = [*self.tokenizer.added_places(text), *lengths, len(text)]
            ends = sorted({_trimmed(text, each) for each in places if each <= len(text)} - {0})
            return ends, list(self.seal.names(scope.salt, text, ends))

        ends, names = await self._off_loop(name, len(text))
        packed = await self._packed(scope, names)
        return [
            (len(text[:end].encode()), _unpacked(ids))
            for end, ids in zip(ends, packed, strict=True)
            if ids
        ]

    async def _packed(self, scope: AnswerScope, names: Sequence[bytes]) -> list[bytes | None]:
        """The packed ids of answers, here or in the store."""
        packed = {name: self.remembered.find(scope.owner, name) for name in names}
        unknown = [name for name, ids in packed.items() if ids is None]
        if unknown and self.store is not None and self.store.asks:
            found = await self.store.find(scope, unknown)
            newest = set(names[-NEWEST_PLACES:])
            for name, ids in zip(unknown, found, strict=True):
                packed[name] = ids
                if ids or (ids is not None and name not in newest):
                    self.remembered.put(scope.owner, name, ids)
        return [packed[name] for name in names]

    # -- an answer ends ---------------------------------------------------------------------------

    async def note(
        self, prompt: PromptText, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        """Remember an answer to a prompt, unless the tokenizer would choose the same ids.
        `output_ids`: ids of the text that the client has received."""
        if not output_ids or len(output_ids) > MAX_ANSWER_TOKENS:
            return
        ids = [*self._head(prompt_ids), *output_ids]
        short = tuple(ids) if len(output_ids) <= SHORT_TOKENS else None
        if short in self._plain:
            return
        try:
            text = b"".join(self.tokenizer.pieces(ids)).decode()
            plain = await self.tokenizer.encode_inside(text)
        except (UnicodeDecodeError, InvalidRequest):
            return
        if plain == ids:
            if short is not None:
                self._keep_plain(short)
            return
        if len(prompt.text) <= MAX_INLINE_CHARS:
            found = self._named(prompt, ids, output_ids)
        else:
            find = partial(self._named, prompt, ids, output_ids)
            found = await self.tokenizer.for_answer(find)
        if found is None:
            return
        end, name = found
        packed = array(_ID_TYPE, ids).tobytes()
        length = None if prompt.scope.is_conversation else end
        self.remembered.put(prompt.scope.owner, name, packed, length)
        if self.store is not None and prompt.scope.may_leave:
            self.store.put(prompt.scope, name, packed)
        self.metrics.remembered.inc()
        self.metrics.num_bytes.set(self.remembered.num_bytes)

    def _keep_plain(self, ids: tuple[int, ...]) -> None:
        """Note that the tokenizer chooses these ids for their text."""
        if len(self._plain) >= MOST_PLAIN:
            del self._plain[next(iter(self._plain))]
        self._plain[ids] = None

    def _head(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """The end of the prompt that is remembered with its answer."""
        added = self.tokenizer.added_ids
        tail = prompt_ids[-HEAD_TOKENS:]
        for place in range(len(tail) - 1, -1, -1):
            if tail[place] in added:
                return tail[place + 1 :]
        return tail

    def _named(
        self, prompt: PromptText, ids: Sequence[int], output_ids: Sequence[int]
    ) -> tuple[int, bytes] | None:
        """The name of an answer, and where its text ends without trailing white space, which some
        templates and clients trim. None for an answer of white space alone, or one that follows a
        truncated prompt."""
        pieces = self.tokenizer.pieces(ids)
        output = b"".join(pieces[len(ids) - len(output_ids) :]).decode(errors="replace")
        text = prompt.text + output
        if not output.strip(_SPACES) or not text.endswith(b"".join(pieces).decode()):
            return None
        end = _trimmed(text, len(text))
        (name,) = self.seal.names(prompt.scope.salt, text, [end])
        return end, name

    async def _off_loop(self, work: Callable[[], _T], num_chars: int) -> _T:
        if num_chars <= MAX_INLINE_CHARS:
            return work()
        return await self.tokenizer.in_thread(work, num_chars)


def _trimmed(text: str, end: int) -> int:
    """The end of a text without the white space before it."""
    while end and text[end - 1] in _SPACES:
        end -= 1
    return end


def _unpacked(packed: bytes) -> array[int]:
    return array(_ID_TYPE, packed)
