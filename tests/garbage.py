"""What anyone who can use the store may write there: every type, with the wrong content."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import redis

ID = "0123456789ab"
HUGE = b"x" * (3 << 20)


def _string(value: bytes) -> Callable[[redis.Redis, str], object]:
    return lambda store, key: store.set(key, value)


GARBAGE: dict[str, Callable[[redis.Redis, str], object]] = {
    "no text": _string(b"\xff\xfe\x00"),
    "empty": _string(b""),
    "huge": _string(HUGE),
    "deep": _string(b"[" * 10_000),
    "another shape": _string(b'{"worker_id": 5, "incarnation": {}, "minute": [1e308], "rows": 7}'),
    "large numbers": _string(b"9" * 4000),
    "no number": _string(b"NaN"),
    "MessagePack": _string(msgspec.msgpack.encode({"a": [1, None, float("nan")]})),
    "a hash": lambda store, key: store.hset(key, mapping={b"\xff": b"nan", "status": b"\xff"}),
    "a list": lambda store, key: store.rpush(key, b"\xff", b"1"),
    "a set": lambda store, key: store.sadd(key, b"\xff", "x", ID),
    "a sorted set": lambda store, key: store.zadd(
        key, {b"\xff": float("inf"), b"x": 1e300, ID.encode(): float("inf")}
    ),
}
"""By what it is: what writes it under a key that does not exist."""


def keys_of(cluster: str, worker_ids: list[str], responses: list[str]) -> list[str]:
    """The keys that processes of a cluster read, those of these workers and kept responses among
    them."""
    names = ["workers", "epoch", "routers", "router_leases"]
    names += [f"{kind}:{each}" for kind in ("worker", "drain") for each in [*worker_ids, "x"]]
    names += [f"router:{ID}", f"router_lease:{ID}"]
    names += [f"responses:{each}" for each in ("all", "sizes", "owners", "total")]
    for owner, _, _ in (each.partition(":") for each in responses):
        names.append(f"responses:of:{owner}")
    names += [f"responses:{kind}:{each}" for kind in ("record", "lease") for each in responses]
    return [f"baton:{cluster}:{each}" for each in names]


def spoil(store: redis.Redis, keys: list[str], first: int) -> None:
    """Replace every key by garbage: by another kind for each, beginning with the kind `first`."""
    kinds = list(GARBAGE.values())
    for place, key in enumerate(keys):
        with store.pipeline(transaction=True) as steps:  # nobody sees the key missing
            steps.delete(key)
            kinds[(first + place) % len(kinds)](steps, key)
            steps.execute()
