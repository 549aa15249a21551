"""Python's literals rewritten as JSON: what Python itself reads, however the text is cut."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.formats.python_value import PythonValue


def rewritten(pieces: list[str]) -> tuple[str | None, str]:
    """JSON of a value (None for no value), and the text behind it."""
    value, json_text, rest = PythonValue(), "", ""
    for piece in pieces:
        if value.complete or value.broken:
            rest += piece
            continue
        end = value.scan(piece, 0)
        json_text += value.take_json()
        rest += piece[end:]
    return (json_text if value.complete else None), rest


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.text("'\"\\\nnx0é😀")
)
VALUES = st.recursive(
    SCALARS, lambda each: st.lists(each) | st.dictionaries(st.text(max_size=5), each), max_leaves=12
)


@given(value=VALUES, data=st.data())
def test_what_python_writes_is_read_however_it_is_cut(value: object, data: st.DataObject) -> None:
    text = repr(value) + ", "
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for cut in (pieces, [text], list(text)):
        found, rest = rewritten(cut)
        assert found is not None
        assert json.loads(found) == value
        assert rest == ", "


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@given(st.text("'\"\\nxuU0179aAé\n {}"))
def test_a_string_says_what_python_says(inner: str) -> None:
    for quote in ("'", '"', "'''", '"""'):
        text = f"{quote}{inner}{quote}"
        try:
            expected = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            continue
        found, rest = rewritten([text + ")"])
        if rest != ")":
            continue  # several literals in a row, which Python joins
        assert found is not None
        assert json.loads(found) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'a\\/b \\q \\x41\\u00e9\\U0001F600\\101\\0'", "a/b \\q Aé😀A\0"),
        ("'\\ud83d\\ude00'", "😀"),
        ('"""say "x" and \'\'\' """', "say \"x\" and ''' "),
        ("''", ""),
        ("'a\\\nb'", "ab"),
        ("(1, 2,)", [1, 2]),
        ("[true, false, null]", [True, False, None]),
        ("{'a': {}, 'b': [], }", {"a": {}, "b": []}),
        ("+1", 1),
        (".5", 0.5),
        ("1.", 1.0),
        ("-1E3", -1000.0),
        ("1" * 50, int("1" * 50)),
    ],
)
def test_a_value(text: str, expected: object) -> None:
    for pieces in ([text + ")"], [*text, ")"]):
        found, rest = rewritten(pieces)
        assert found is not None
        assert json.loads(found) == expected
        assert rest == ")"


@pytest.mark.parametrize(
    "text",
    [
        *("foo", "1-2", "0x1f", "007", "1_0", "--1", "1e999", "nan", "f'x'", "b'x'", "lambda: 1"),
        *("[1 2]", "[,]", "[1,,2]", "[1}", "{1: 2}", "{'a'}", "{'a': }", "{'a' 1}", "1" * 500),
        *("'\\xg1'", "'\\U00110000'", "[" * 300, "=", ")"),
    ],
)
def test_what_is_no_value(text: str) -> None:
    for pieces in ([text + " "], [*text, " "]):
        assert rewritten(pieces)[0] is None


@given(st.text("'\"\\[](){}:,.-+0e1Tru Nonex \n"), st.data())
def test_any_text_ends_the_same_however_it_is_cut(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = rewritten([text])
    assert rewritten(pieces) == whole
    if whole[0] is not None:
        json.loads(whole[0])
