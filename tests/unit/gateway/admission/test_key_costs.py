"""What looking up a key costs, in hashes: the same among many keys as among few."""

from __future__ import annotations

import hashlib

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse

from gateway.admission import api_keys
from gateway.admission.api_keys import KeyRing, StoredKey, hash_key, id_of, make_key, parse_line
from gateway.http.access import AccessRules, KeyCheck
from http_kit.tenant import KeyTerms

MANY = 100_000
OLD = [f"baton-{letter * 43}" for letter in "abcde"]
"""As keys were made before they had an id."""
WRONG_OLD = "baton-" + "z" * 43


class Hashes:
    """Counts the hashes that are computed, of whatever kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        compute = hashlib.blake2b

        def counting(*args, **kwargs):
            self._count += 1
            return compute(*args, **kwargs)

        monkeypatch.setattr(hashlib, "blake2b", counting)

    def take(self) -> int:
        """How many since the last call."""
        count, self._count = self._count, 0
        return count


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> Hashes:
    return Hashes(monkeypatch)


def test_many_keys_cost_what_one_does(hashes: Hashes) -> None:
    key = make_key()
    right = parse_line(hash_key(key))
    others = [StoredKey(f"{n:016x}", b"s" * 16, b"d" * 32, KeyTerms("o")) for n in range(MANY)]
    wrong_secret = key[:-1] + ("a" if key[-1] != "a" else "b")
    for keys in ([right], [*others, right]):
        ring = KeyRing()
        ring.replace(keys)
        hashes.take()
        assert ring.find(key) is not None
        assert hashes.take() == 1
        assert ring.find(wrong_secret) is None
        assert hashes.take() == 1
        for unknown in (make_key(), WRONG_OLD, "", "baton-", f"baton-{id_of(key)}-"):
            assert ring.find(unknown) is None
        assert hashes.take() == 0


def test_keys_without_an_id_alone_are_searched_and_misses_are_remembered_for_a_second(
    hashes: Hashes,
) -> None:
    now = 0.0
    ring = KeyRing([*map(hash_key, OLD), hash_key(make_key())], clock=lambda: now)
    hashes.take()
    remembered = 1
    for key, is_right in ((WRONG_OLD, False), (OLD[2], True)):
        assert (ring.find(key) is not None) is is_right
        assert hashes.take() == remembered + len(OLD)
        assert (ring.find(key) is not None) is is_right
        assert hashes.take() == remembered
    now = 1.0
    assert ring.find(WRONG_OLD) is None
    assert hashes.take() == remembered + len(OLD)
    assert ring.find(OLD[2]) is not None
    assert hashes.take() == remembered
    ring.replace([parse_line(hash_key(WRONG_OLD))])
    assert ring.find(WRONG_OLD) is not None
    assert ring.find(OLD[2]) is None


def test_few_misses_are_remembered(monkeypatch: pytest.MonkeyPatch, hashes: Hashes) -> None:
    monkeypatch.setattr(api_keys, "_MOST_REMEMBERED", 2)
    ring = KeyRing([hash_key(OLD[0])], clock=lambda: 0.0)
    for letter in "vwxyz":
        ring.find(letter * 20)
    hashes.take()
    for letter, cost in (("z", 1), ("y", 1), ("v", 2)):
        ring.find(letter * 20)
        assert hashes.take() == cost, letter


@pytest.mark.parametrize(
    ("path", "bearer", "api_key", "cost"),
    [
        ("/live", WRONG_OLD, WRONG_OLD, 0),
        ("/dashboard/", WRONG_OLD, OLD[0], 0),
        ("/docs", OLD[0], None, 0),
        ("/v1/models", None, None, 0),
        ("/v1/models", "no key", None, 2),  # one to remember it, one to compare
        ("/v1/models", WRONG_OLD, WRONG_OLD[:-1], 4),
        ("/v1/models", WRONG_OLD, WRONG_OLD, 3),
        ("/v1/models", OLD[0], None, 4),  # and two for the digests of caller and tenant
        ("/metrics", WRONG_OLD, None, 2),
        ("/control/drain", WRONG_OLD, None, 2),
    ],
)
async def test_a_request_looks_its_keys_up_once_and_on_closed_paths_alone(
    hashes: Hashes, path: str, bearer: str | None, api_key: str | None, cost: int
) -> None:
    rules = AccessRules(api=KeyRing([hash_key(OLD[0])]), admin=KeyRing([hash_key(OLD[1])]))
    app = KeyCheck(PlainTextResponse("inside"), rules, CollectorRegistry())
    headers = {} if bearer is None else {"authorization": f"Bearer {bearer}"}
    headers |= {} if api_key is None else {"x-api-key": api_key}
    hashes.take()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        await client.get(path, headers=headers)
    assert hashes.take() == cost
