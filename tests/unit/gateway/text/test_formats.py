"""Formats of JSON Schema 2020-12: what is generated follows them, and what follows them can be
generated; the others are named."""

from __future__ import annotations

import calendar
import json
import random
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from gateway.grammars.json_schemas import SchemaReader
from gateway.grammars.patterns import ENFORCED, NOT_ENFORCED
from protocol.errors import InvalidRequest
from tests.effort import times
from tests.paths import DEMO_MODEL

STANDARD = {
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
    "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
}  # fmt: skip
FOLLOW: dict[str, tuple[str, ...]] = {
    "date": ("2024-02-29", "2000-02-29", "1999-12-31", "2023-02-28"),
    "time": ("23:59:60Z", "00:00:00.123+05:30", "12:00:00z"),
    "date-time": ("2024-02-29T23:59:59Z", "1990-12-31t15:59:50.5-08:00"),
    "duration": ("P1Y2M3D", "PT36H", "P4W"),
    "email": ("a.b+c@example.com", "x@[127.0.0.1]", "a" * 64 + "@b"),
    "hostname": ("a", "www.example.com", "xn--4gbwdl.xn--wgbh1c", "1host", "a" * 63 + ".b", "a--b"),
    "ipv4": ("127.0.0.1", "255.255.255.255"),
    "ipv6": ("::1", "2001:db8::ff00:42:8329", "1:2:3:4:5:6:7:8"),
    "uri": ("https://a.b/c?d=e#f", "urn:a:b", "mailto:x@y"),
    "uri-reference": ("https://a.b/", "/a/b?c", "a#b", "", "//a.b:8/c", "../x"),
    "uuid": ("2eb8aa08-aa98-11ea-b4aa-73b441d16380",),
    "uri-template": ("http://a/{b}/{c*}", "{?x,y:3}", "a'b%41", ""),
    "json-pointer": ("", "/", "/a~1b/~0/0", "/ä"),
    "relative-json-pointer": ("0", "1/a", "12#"),
}
VIOLATE: dict[str, tuple[str, ...]] = {
    "date": ("2023-02-29", "1900-02-29", "2024-02-30", "2024-04-31", "2024-2-1", "x2024-01-01"),
    "time": ("24:00:00Z", "12:00:60Z", "23:58:60Z", "12:00:00", "12:00:00+24:00"),
    "date-time": ("2023-02-29T00:00:00Z", "2024-01-01 00:00:00Z", "2024-01-01T00:00:00"),
    "duration": ("P", "P1", "PT", "P1Y2W", "1D"),
    "email": ("a", "a@", "@b", "a..b@c", ".a@b", "a" * 65 + "@b", "a@-b", "a@" + "b" * 64),
    "hostname": (
        "", ".", "a.", ".a", "-a", "a-", "a..b", "a_b", "a" * 64, "1.2.3.4", "42", "a.1",
        "a." * 126 + "bb", "ä.de",
    ),
    "ipv4": ("256.0.0.1", "1.2.3", "01.2.3.4"),
    "ipv6": ("1::2::3", "12345::", "1:2:3:4:5:6:7"),
    "uri": ("/a", "a b:c", "http://a b"),
    "uri-reference": ("//a@b@c", "a b", "\\a", "1:b", "#a#b"),
    "uuid": ("2eb8aa08-aa98-11ea-b4aa-73b441d1638", "2eb8aa08aa9811eab4aa73b441d16380"),
    "uri-template": ("{", "{}", "a b", "{a,}", "%zz"),
    "json-pointer": ("a", "/~", "/~2", "#/a"),
    "relative-json-pointer": ("", "01", "-1", "/a", "1a"),
}  # fmt: skip
Accepts = Callable[[str, str], bool]


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer(str(DEMO_MODEL / "tokenizer.json"), slices=[])


@pytest.fixture(scope="module")
def matchers(vocabulary: LLTokenizer) -> dict[str, LLMatcher]:
    """At the beginning of a text of each format."""
    made = {}
    for name in ENFORCED:
        reader = SchemaReader({"type": "string", "format": name}, "s", strict=True)
        made[name] = LLMatcher(vocabulary, reader.grammar, log_level=0)
        assert not made[name].is_error(), made[name].get_error()
    return made


@pytest.fixture(scope="module")
def accepts(vocabulary: LLTokenizer, matchers: dict[str, LLMatcher]) -> Accepts:
    def check(name: str, text: str) -> bool:
        matcher = matchers[name].deep_copy()
        tokens = vocabulary.tokenize_str(json.dumps(text, ensure_ascii=False))
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return check


def follows(name: str, text: str) -> bool:
    """Whether two other checkers take the text. Python knows no year 0 and no leap second."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "format": name}
    rust = jsonschema_rs.validator_for(schema, validate_formats=True)
    python = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    is_unknown = text.startswith("0000-") or ":60" in text
    return rust.is_valid(text) and (is_unknown or python.is_valid(text))


def test_every_format_of_the_standard_is_enforced_or_named() -> None:
    assert ENFORCED | NOT_ENFORCED == STANDARD
    assert not ENFORCED & NOT_ENFORCED
    assert FOLLOW.keys() == VIOLATE.keys() == ENFORCED


@pytest.mark.parametrize("name", sorted(ENFORCED))
def test_a_format_takes_what_follows_it_and_nothing_else(accepts: Accepts, name: str) -> None:
    assert [text for text in FOLLOW[name] if not accepts(name, text)] == []
    assert [text for text in VIOLATE[name] if accepts(name, text)] == []
    assert [text for text in FOLLOW[name] if not follows(name, text)] == []


def generated(matcher: LLMatcher, vocabulary: LLTokenizer, random_: random.Random) -> str:
    """The text of a random walk through what is allowed, which ends as soon as it may, or after
    some tokens is given up."""
    tokens: list[int] = []
    quote = vocabulary.tokenize_str('"')[0]
    for _ in range(60):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        ends = tokens and allowed >> quote & 1 and random_.random() < 0.4
        token = quote if ends else random_.choice(list(_bits(allowed, random_)))
        assert matcher.consume_token(token)
        tokens.append(token)
        if matcher.is_accepting():
            return str(json.loads(vocabulary.decode_str(tokens)))
    return ""


def _bits(mask: int, random_: random.Random) -> Iterator[int]:
    """Some of a mask's bits."""
    start = random_.randrange(mask.bit_length())
    for place in (
        *range(start, min(start + 400, mask.bit_length())),
        (mask & -mask).bit_length() - 1,
    ):
        if mask >> place & 1:
            yield place


@pytest.mark.parametrize("name", sorted(ENFORCED))
def test_what_is_generated_follows_the_format(
    vocabulary: LLTokenizer, matchers: dict[str, LLMatcher], name: str
) -> None:
    for seed in range(times(everyday=15, nightly=500)):
        text = generated(matchers[name].deep_copy(), vocabulary, random.Random(seed))
        assert not text or follows(name, text), text


@settings(max_examples=times(everyday=40, nightly=3000), deadline=None)
@given(st.integers(1, 9999), st.integers(0, 13), st.integers(0, 32))
def test_dates_are_those_of_the_calendar(accepts: Accepts, year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    exists = 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1]
    assert accepts("date", text) == exists
    assert accepts("date-time", f"{text}T00:00:00Z") == exists
    if exists:
        date.fromisoformat(text)


@settings(max_examples=times(everyday=30, nightly=3000), deadline=None)
@given(name=st.sampled_from(sorted(ENFORCED)), data=st.data())
def test_a_changed_text_is_taken_only_if_it_still_follows(
    accepts: Accepts, name: str, data: st.DataObject
) -> None:
    text = data.draw(st.sampled_from(FOLLOW[name]))
    place = data.draw(st.integers(0, len(text)))
    inserted = data.draw(st.text("aZ0129-.:@/~%{}#T ", max_size=2))
    changed = text[:place] + inserted + text[place + data.draw(st.integers(0, 2)) :]
    assert not accepts(name, changed) or follows(name, changed), changed


@pytest.mark.parametrize("name", sorted(NOT_ENFORCED))
def test_a_format_that_is_not_enforced_is_named(name: str) -> None:
    schema: dict[str, Any] = {"properties": {"a": {"type": "string", "format": name}}}
    assert SchemaReader(schema, "s", strict=False).dropped == ["s/properties/a/format"]
    with pytest.raises(InvalidRequest, match="'format' at '#/properties/a' cannot be enforced"):
        SchemaReader(schema, "s", strict=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "password"},
        {"type": "integer", "format": "int32"},
        {"type": "integer", "format": "regex"},
        {"format": ["date"]},
        {"format": None},
    ],
)
def test_a_format_that_asks_for_nothing_is_an_annotation(schema: dict[str, Any]) -> None:
    reader = SchemaReader(schema, "s", strict=True)
    assert reader.dropped == []
    assert "format" not in reader.grammar


def test_a_format_holds_beside_other_keywords(vocabulary: LLTokenizer) -> None:
    schema = {"type": ["string", "null"], "format": "date", "pattern": "^20", "maxLength": 10}
    matcher = LLMatcher(vocabulary, SchemaReader(schema, "s", strict=True).grammar, log_level=0)
    for text, follows_all in (
        ('"2024-02-29"', True),
        ("null", True),
        ('"1999-01-01"', False),
        ('"2023-02-29"', False),
    ):
        tokens, copy = vocabulary.tokenize_str(text), matcher.deep_copy()
        taken = copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()
        assert taken == follows_all, text
