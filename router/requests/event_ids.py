"""The ids of a stream's events, by which its client may go on with it at any router.

`cmpl-4fe1.6741b2c0.0.9c3d...:12,9e`: the request, when it began (seconds of the Unix epoch), its
life (0 until it is resumed), and a keyed digest that binds these to the request's body; then for
each choice the number of tokens that its events so far stand for, with an `e` once its end was
told, and at last a `u` once the usage was. Positions count tokens, whatever the events they came
in, so that they mean the same everywhere. Where a token makes several events (`resp-4fe1...:12.31`)
these are counted, too: they are made token by token, and so come again as they were. Pure; knows no
HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import InvalidRequest

HEADER = "Last-Event-ID"
_DIGEST_BYTES = 16
_EVENT_END = b"\n\n"
_NAME = (
    r"(?P<name>(?P<request_id>[a-z]{1,16}[-_][0-9a-f]{32})\."
    r"(?P<created>[0-9a-f]{1,10})\.(?P<life>[0-9a-f]{1,8}))\.(?P<digest>[0-9a-f]{32}):"
)
_ID = re.compile(_NAME + r"(?P<positions>[0-9]{1,10}e?(?:,[0-9]{1,10}e?)*)(?P<usage>u?)")
_NUMBERED_ID = re.compile(_NAME + r"(?P<positions>[0-9]{1,10}\.[0-9]{1,10})(?P<usage>)")


@dataclass(frozen=True, slots=True)
class Position:
    """How much of a choice its client has: tokens, and whether it knows the end; where events are
    numbered, those instead."""

    num_tokens: int = 0
    has_ended: bool = False
    num_events: int = 0


NOTHING = Position()


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """One stream, over all routers that serve it. `life` is greater with every time that it is
    resumed, also from the same event: milliseconds since it began.

    `positions` is what its client has, one for each choice; empty for a new stream. One that
    `numbers_events` has one choice.
    """

    request_id: str
    created: int
    life: int = 0
    positions: tuple[Position, ...] = ()
    knows_usage: bool = False
    numbers_events: bool = False

    def position_of(self, choice: int) -> Position:
        """What the client has of a choice."""
        return self.positions[choice] if choice < len(self.positions) else NOTHING


def resumed_identity(
    last_id: str, key: bytes, body_digest: bytes, now_s: float, numbers_events: bool = False
) -> StreamIdentity:
    """The stream that an event's id names, in a new life (`now_s`: of the Unix epoch).

    Raises InvalidRequest for an id that is none, and one that was not given out under `key` for a
    body of this digest.
    """
    found = (_NUMBERED_ID if numbers_events else _ID).fullmatch(last_id)
    if found is None:
        raise InvalidRequest(f"'{HEADER}' is not the id of an event of a stream", HEADER)
    if not hmac.compare_digest(_digest(found["name"], key, body_digest), found["digest"]):
        raise InvalidRequest(
            f"'{HEADER}' does not belong to this request: to resume a stream, send its request "
            "again with the same body",
            HEADER,
        )
    positions = tuple(map(_position, found["positions"].split(",")))
    created = int(found["created"], 16)
    life = max(int(found["life"], 16) + 1, int((now_s - created) * 1000))
    request_id, knows_usage = found["request_id"], bool(found["usage"])
    return StreamIdentity(request_id, created, life, positions, knows_usage, numbers_events)


def _position(text: str) -> Position:
    tokens, _, events = text.removesuffix("e").partition(".")
    return Position(int(tokens), text.endswith("e"), int(events or 0))


class Bookmark:
    """Where the client of a stream is after each event that is made."""

    def __init__(
        self, identity: StreamIdentity, num_choices: int, key: bytes, body_digest: bytes
    ) -> None:
        self._prefix = _prefix(identity, key, body_digest)
        self._known = [identity.position_of(choice) for choice in range(num_choices)]
        self._num_tokens = [each.num_tokens if each.has_ended else 0 for each in self._known]
        self._shown = [_shown(each) for each in self._known]
        self._suffix = b"u\n" if identity.knows_usage else b"\n"

    def advance(self, choice: int, num_tokens: int, has_ended: bool) -> bool:
        """So many more tokens of a choice, from its first one on. Returns whether they, or the
        end, are new to the client."""
        before, known = self._num_tokens[choice], self._known[choice]
        self._num_tokens[choice] = before + num_tokens
        if before < known.num_tokens and not has_ended:
            return False
        self._shown[choice] = b"%d" % self._num_tokens[choice] + (b"e" if has_ended else b"")
        return True

    def tell_usage(self) -> None:
        """The usage goes out with the next event."""
        self._suffix = b"u\n"

    def marked(self, event: bytes) -> bytes:
        """The event that was just made, with its `id:` line."""
        return self._prefix + b",".join(self._shown) + self._suffix + event


class EventCount:
    """The same for a stream of one choice whose events are numbered: all of them are made again,
    and those that its client has are left out."""

    def __init__(self, identity: StreamIdentity, key: bytes, body_digest: bytes) -> None:
        self._prefix = _prefix(identity, key, body_digest)
        self._num_known = identity.position_of(0).num_events
        self._num_tokens = self._num_events = 0

    def advance(self, choice: int, num_tokens: int, has_ended: bool) -> bool:
        """See Bookmark; only the events tell what is new."""
        self._num_tokens += num_tokens
        return True

    def tell_usage(self) -> None:
        """See Bookmark: an event like the others."""

    def marked(self, events: bytes) -> bytes:
        """See Bookmark; of several whole events those that are new."""
        marked: list[bytes] = []
        for event in events.split(_EVENT_END)[:-1]:
            self._num_events += 1
            if self._num_events > self._num_known:
                position = b"%d.%d\n" % (self._num_tokens, self._num_events)
                marked += (self._prefix, position, event, _EVENT_END)
        return b"".join(marked)


def body_digest(body: bytes) -> bytes:
    """What ids are bound to of a request's body."""
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def ids_key(cluster_secret: str) -> bytes:
    """The key of the ids: the same at all routers of a cluster, and told to nobody else."""
    return hashlib.blake2b(cluster_secret.encode(), digest_size=32, person=b"event ids").digest()


def _prefix(identity: StreamIdentity, key: bytes, digest_of_body: bytes) -> bytes:
    """What the `id:` lines of a life begin with."""
    name = f"{identity.request_id}.{identity.created:x}.{identity.life:x}"
    return f"id: {name}.{_digest(name, key, digest_of_body)}:".encode()


def _digest(name: str, key: bytes, digest_of_body: bytes) -> str:
    data = name.encode() + b"\n" + digest_of_body
    return hashlib.blake2b(data, key=key, digest_size=_DIGEST_BYTES).hexdigest()


def _shown(position: Position) -> bytes:
    return b"%d" % position.num_tokens + (b"e" if position.has_ended else b"")


def check_positions(identity: StreamIdentity, most_tokens: Sequence[int]) -> None:
    """Raises InvalidRequest unless the positions fit choices of at most so many tokens each."""
    if not identity.positions:
        return
    fits = len(identity.positions) == len(most_tokens) and all(
        position.num_tokens <= most
        for position, most in zip(identity.positions, most_tokens, strict=True)
    )
    if not fits:
        raise InvalidRequest(f"'{HEADER}' does not fit this request's choices", HEADER)
