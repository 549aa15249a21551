"""Token ids to text, one token at a time.

Joined, the pieces equal the decoding of all tokens at once, and no piece ever holds a part of a
character: bytes of an unfinished one wait for the next token, or for `flush`. Bytes that can
never become UTF-8 turn into U+FFFD as soon as that is known.
"""

from __future__ import annotations

import codecs
from collections.abc import Set

from router.text.token_bytes import TokenBytes

_NewDecoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes one sequence. Tokens in `skipped_ids` contribute no text.

    `at_start` says that no text precedes the sequence: then the leading space that some
    encodings put before the first word is dropped, as decoding the whole text would.
    """

    def __init__(self, token_bytes: TokenBytes, skipped_ids: Set[int], at_start: bool) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._strip = at_start and token_bytes.strips_leading_space
        self._utf8 = _NewDecoder(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty inside a character or for a skipped token."""
        if token_id in self._skipped_ids:
            return ""
        data = self._token_bytes.of(token_id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Text of what still waits: U+FFFD for a character that never came to its end."""
        return self._utf8.decode(b"", final=True)
