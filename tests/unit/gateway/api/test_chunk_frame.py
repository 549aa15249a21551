"""A frame filled with a text is the chunk that would have been encoded with it."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.openai.chunk_frame import TextFrame


def document(text: str) -> bytes:
    return msgspec.json.encode({"id": 'a "name"', "choices": [{"text": text, "index": 0}]})


@given(st.text())
def test_a_filled_frame_equals_the_encoded_document(text: str) -> None:
    assert TextFrame(document).fill(text) == document(text)
