"""JSON as models write it: what is valid stays as it is, and what is not becomes valid."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.chat.json_value import JsonValue, mended
from gateway.chat.past_calls import arguments_object, arguments_text
from protocol.errors import InvalidRequest

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
LOOSE = ["{", "}", "[", "]", '"', "'", ",", ":", " ", "\n", "\\", "\\u12", "\\ud83d", "a", "True"]
LOOSE += [
    "-1.5e3",
    "007",
    "null",
    "é",
    "\t",
    "<",
    "\x00",
    '"a": ',
    "None",
    ".5",
    "+",
    "\u2028",
    "9" * 330,
]


def no_json(word: str) -> float:
    """Refuse `Infinity` and `NaN`, which Python reads as JSON."""
    raise AssertionError(f"{word} is no JSON")


def written(pieces: list[str]) -> tuple[str, bool, bool, int]:
    """What a value makes of the pieces, and how many characters belong to it."""
    value, length = JsonValue(), 0
    for piece in pieces:
        if not (value.complete or value.broken):
            length += value.scan(piece, 0)
    return value.take_json(), value.complete, value.broken, length


@given(
    document=st.dictionaries(st.text(), documents, max_size=3),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_valid_json_is_unchanged(document: object, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent)
    assert written([text + "}"]) == (text, True, False, len(text))
    assert arguments_object(text, "p") == document
    assert arguments_text(text, "p") == text


@given(st.lists(st.sampled_from(LOOSE), max_size=20))
@example(['"a": ', "9" * 330, ".", "}"])
@example(["{", "'", "é", "\\", "'", "'", ":", "True", " ", "a", " ", ",", "}"])
def test_any_text_becomes_valid_json_however_it_is_cut(pieces: list[str]) -> None:
    text = "{" + "".join(pieces)
    whole = written([text])
    assert written(list(text)) == whole
    assert written(["{", *pieces]) == whole
    if whole[1]:
        assert isinstance(json.loads(whole[0], parse_constant=no_json), dict)
    value = JsonValue()
    value.scan(text, 0)
    assert value.complete_anyhow()
    completed = value.take_json()
    assert isinstance(json.loads(completed, parse_constant=no_json), dict)
    assert whole[0].startswith(completed.rstrip('"]} \t\r\n')), "nothing is invented"
    assert isinstance(arguments_object(text, "p"), dict)
    assert isinstance(json.loads(arguments_text(text, "p")), dict)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"hot": True, "cold": False, "x": None}', {"hot": True, "cold": False, "x": None}),
        ("{city: Bern}", {"city": "Bern"}),
        ("{city: New York, at: 10:30}", {"city": "New York", "at": "10:30"}),
        ("{'it': 'a \"b\" c', \"b\": 1,}", {"it": 'a "b" c', "b": 1}),
        ('{"a": "line\nnext\ttab"}', {"a": "line\nnext\ttab"}),
        (r'{"re": "\d+\.\'"}', {"re": r"\d+\.'"}),
        (r'{"a": "\u00e9\u12 x"}', {"a": "é\\u12 x"}),
        ('{"a": [1, 2}', {"a": [1, 2]}),
        ('{"a": 1]}', {"a": 1}),
        ('{"a": +1, "b": .5, "c": 1., "d": 007}', {"a": 1, "b": 0.5, "c": 1.0, "d": "007"}),
    ],
)
def test_small_mistakes_are_mended(text: str, value: object) -> None:
    assert json.loads(mended(text) or "") == value


@pytest.mark.parametrize("text", ["", "{", '{"a"', '{"a": "b" "c"}', "{{}}", '{"a": 1} x', "(1)"])
def test_other_mistakes_are_not(text: str) -> None:
    assert mended(text) is None or text == "{"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        ("null", {}),
        ('{"a": "x', {"a": "x"}),
        ('{"a": {"b": [1, ', {"a": {"b": [1]}}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": {"b"', {"a": {}}),
        ('{"a": true, "b": ', {"a": True}),
        ('{"a": true, "b": 12', {"a": True}),
        ('{"a": [1, 12', {"a": [1]}),
        ('{"a": true', {"a": True}),
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ('{"print("x")"}', {"arguments": '{"print("x")"}'}),
        ('{"a": 1} and more', {"arguments": '{"a": 1} and more'}),
        ("[1]", {"arguments": "[1]"}),
        ("print(1)", {"arguments": "print(1)"}),
        ('{"a": ' + "9" * 5000 + "}", {"arguments": '{"a": ' + "9" * 5000 + "}"}),
    ],
)
def test_past_arguments_are_an_object_whatever_they_were(text: str, arguments: object) -> None:
    assert arguments_object(text, "p") == arguments
    assert json.loads(arguments_text(text, "p")) == arguments


@pytest.mark.parametrize("depth", [300, 2000, 100_000])
def test_arguments_may_not_nest_deeper_than_a_body(depth: int) -> None:
    with pytest.raises(InvalidRequest, match="nests deeper") as caught:
        arguments_object('{"a":' + "[" * depth + "]" * depth + "}", "messages[0].tool_calls")
    assert caught.value.param == "messages[0].tool_calls"
