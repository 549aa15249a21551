"""Text of a server cannot steer a terminal, and loses no letter."""

from __future__ import annotations

import pytest

from cli.output.terminal_text import shown, shown_json


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\x1b[2Jb\x07\tc\n\x9bd\r", "a[2Jb\tc\nd"),
        ("\x1b]52;c;ZXZpbA==\x07", "]52;c;ZXZpbA=="),
        ("user\u202e\u2066admin\u2069\u202c\u200f", "useradmin"),
        ("a\u2028b\u2029c\ufeffd\U000e0041", "abcd"),
        ("half \ud83d", "half "),
        ("grüße, 日本, شما\u200cها, 👩\u200d💻", "grüße, 日本, شما\u200cها, 👩\u200d💻"),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_what_acts_in_a_terminal_is_left_out(text: str, expected: str) -> None:
    assert shown(text) == expected
    assert shown_json({text: [text, {"a": text}, 1, None, True]}) == {
        expected: [expected, {"a": expected}, 1, None, True]
    }
