"""Token ids to text, one token at a time.

The joined pieces equal the decoding of all tokens at once. No piece ever holds part of a
character: the bytes of an incomplete character wait for the next token, or for `flush`. Bytes
that cannot become valid UTF-8 turn into U+FFFD as soon as that is certain.
"""

from __future__ import annotations

from collections.abc import Set
from encodings.utf_8 import IncrementalDecoder

from gateway.text.token_bytes import TokenBytes


class Detokenizer:
    """Decodes one sequence. Tokens in `skipped_ids` contribute no text.

    `at_start` says that no text precedes the sequence. The leading space that some encodings put
    before the first word is then dropped, as in the decoding of a whole text.
    """

    def __init__(self, token_bytes: TokenBytes, skipped_ids: Set[int], at_start: bool) -> None:
        self._token_bytes = token_bytes
        self._texts = token_bytes.texts
        self._skipped_ids = skipped_ids
        self._at_start = at_start
        self._strip = at_start and token_bytes.strips_leading_space
        self._utf8: IncrementalDecoder | None = None  # made for the first token that needs it
        self._waits = False  # it holds bytes of an incomplete character

    def fresh(self) -> Detokenizer:
        """A decoder of another text in the same place."""
        return Detokenizer(self._token_bytes, self._skipped_ids, self._at_start)

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty inside a character or for a skipped token."""
        if token_id in self._skipped_ids:
            return ""
        if not self._waits and not self._strip:  # nearly every token
            text = self._texts.get(token_id)
            if text is not None:
                return text
        data = self._token_bytes.of(token_id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        if self._utf8 is None:
            self._utf8 = IncrementalDecoder(errors="replace")
        text = self._utf8.decode(data)
        self._waits = bool(self._utf8.buffer)
        return text

    def flush(self) -> str:
        """Text of the waiting bytes: U+FFFD for a character that was never completed."""
        if self._utf8 is None or not self._waits:
            return ""
        self._waits = False
        return self._utf8.decode(b"", final=True)
