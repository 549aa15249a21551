"""Keys at rest: hashes only, and nothing but a right key is admitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import ConfigError
from router.http.api_keys import KeyRing, hash_key, load_key_ring, make_key


def test_a_key_is_admitted_by_its_own_hash_and_no_other() -> None:
    first, second, stranger = make_key(), make_key(), make_key()
    ring = KeyRing([hash_key(first), hash_key(second)])
    assert len(ring) == 2
    assert ring.admits(first)
    assert ring.admits(second)
    for wrong in (stranger, "", first[:-1], first + "x", first.upper(), hash_key(first), "é" * 30):
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


def test_a_ring_is_of_plain_keys_and_of_a_file(tmp_path: Path) -> None:
    plain, filed = make_key(), make_key()
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\n{hash_key(filed)}  # the batch job\n")
    ring = load_key_ring([plain], str(path))
    assert ring.admits(plain)
    assert ring.admits(filed)
    assert len(ring) == 2


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
        load_key_ring([], str(path))
    assert "somebody" not in str(caught.value)
