"""Keys at rest: hashes only, nothing but a right key is admitted, each with what it allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.admission.api_keys import KeyRing, hash_key, key_line, make_key, parse_line, read_keys
from http_kit.tenant import KeyTerms
from protocol.errors import ConfigError


def test_a_key_is_admitted_by_its_own_hash_and_no_other() -> None:
    first, second, stranger = make_key(), make_key(), make_key()
    ring = KeyRing([hash_key(first), hash_key(second)])
    assert len(ring) == 2
    for _ in range(2):
        assert ring.admits(first)
        assert ring.admits(second)
        hashed = hash_key(first)
        for wrong in (stranger, "", first[:-1], first + "x", first.upper(), hashed, "é" * 30):
            assert not ring.admits(wrong)
    assert not KeyRing().admits("")
    assert not KeyRing()


def test_hashes_are_salted_and_do_not_show_the_key() -> None:
    key = make_key()
    one, other = hash_key(key), hash_key(key)
    assert one != other
    assert key not in one
    assert KeyRing([one]).admits(key)
    assert KeyRing([other]).admits(key)


@pytest.mark.parametrize(
    "key", ["", "short", "x" * 19, "a key with spaces in it, long", "ключ" * 9]
)
def test_weak_keys_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="at least 20"):
        hash_key(key)


def test_a_key_that_was_replaced_is_forgotten_at_once() -> None:
    first, second = make_key(), make_key()
    ring = KeyRing([hash_key(first)])
    assert ring.admits(first)
    ring.replace([parse_line(hash_key(second))])
    assert not ring.admits(first)
    assert ring.admits(second)


@pytest.mark.parametrize(
    ("fields", "terms"),
    [
        ("", KeyTerms("key 1")),
        ("  # the batch job", KeyTerms("the batch job")),
        (" name=batch # nightly", KeyTerms("batch")),
        (" name=ops priority=-2 max_priority=-10", KeyTerms("ops", -2, -10)),
        (" max_priority=3", KeyTerms("key 1", 3, 3)),
        (" cache=team-a inflight=7", KeyTerms("key 1", inflight=7, cache="team-a")),
        (" ttft_ms=500 tpot_ms=40", KeyTerms("key 1", ttft_ms=500, tpot_ms=40)),
    ],
)
def test_a_line_says_what_its_key_allows(fields: str, terms: KeyTerms) -> None:
    key = make_key()
    found = KeyRing([hash_key(key) + fields]).find(key)
    assert found is not None
    assert found.terms == terms


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ("name=", "name has 1 to 64"),
        ("name=a/b", "name has 1 to 64"),
        ("cache=grüße", "cache has 1 to 64"),
        ("priority=high", "priority must be a whole number"),
        ("priority=1e3", "priority must be a whole number"),
        ("inflight=0", "inflight must be at least 1"),
        ("tiers=never", "tiers is on or off"),
        ("inflight=-1", "inflight must be at least 1"),
        ("priority=1 priority=2", "priority is given twice"),
        ("weight=3", "a field must be one of name, priority, max_priority, inflight, cache"),
        ("secret", "a field must be one of"),
        ("priority=-1", "more urgent than max_priority"),
    ],
)
def test_a_wrong_field_is_named(fields: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_line(f"{hash_key(make_key())} {fields}")


def test_keys_of_operators_have_a_name_and_no_terms(tmp_path: Path) -> None:
    path = tmp_path / "admins"
    path.write_text(f"{hash_key(make_key())} name=ops\n")
    assert [each.terms.name for each in read_keys(str(path), has_terms=False)] == ["ops"]
    path.write_text(f"{hash_key(make_key())} inflight=3\n")
    with pytest.raises(ConfigError, match="line 1: inflight is for clients' keys only"):
        read_keys(str(path), has_terms=False)


def test_a_line_that_was_written_reads_the_same() -> None:
    for terms in (
        KeyTerms("a"),
        KeyTerms("b", 2, -3, 5, "group"),
        KeyTerms("c", max_priority=-1),
        KeyTerms("d", tiers=False),
        KeyTerms("e", ttft_ms=500, tpot_ms=40),
    ):
        assert parse_line(key_line(hash_key(make_key()), terms)).terms == terms


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("b2:aa:bb\n", "line 1: not a hash"),
        ("# fine\nplain-key-that-somebody-pasted\n", "line 2: not a hash"),
        ("# nothing\n", "holds no key"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_key_file_is_told_without_its_content(
    tmp_path: Path, content: str | None, told: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=told) as caught:
        read_keys(str(path))
    assert "somebody" not in str(caught.value)
