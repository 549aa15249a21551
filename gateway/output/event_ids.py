"""The ids of a stream's events, with which a client may resume the stream at any router.

`cmpl-4fe1.6741b2c0.0.9c3d...:12,9e` holds the request id, its start (seconds since the Unix
epoch), its life (0 until it is resumed), and a keyed digest that binds these to the request's
body and owner. A life is followed by a digest of the prompts if they have ids of remembered
answers. Then comes, for each choice, the number of tokens in its events so far, with an `e`
once its end was sent, and finally a `u` once the usage was sent. Positions count tokens, not
events, so that they mean the same at every router. Where one token makes several events
(`resp_4fe1...:12.31`), events are counted too: they are made token by token, so a second run
makes the same ones. Pure; knows no HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gateway.admission.request_terms import OPEN_TERMS, RequestTerms
from protocol.errors import InvalidRequest

HEADER = "Last-Event-ID"
_DIGEST_BYTES = 16
RESTORED_BYTES = 8
_EVENT_END = b"\n\n"
_NAME = (
    r"(?P<name>(?P<request_id>[a-z]{1,16}[-_][0-9a-f]{32})\."
    r"(?P<created>[0-9a-f]{1,10})\.(?P<life>[0-9a-f]{1,8})(?:-(?P<restored>[0-9a-f]{16}))?)"
    r"\.(?P<digest>[0-9a-f]{32}):"
)
_ID = re.compile(_NAME + r"(?P<positions>[0-9]{1,10}e?(?:,[0-9]{1,10}e?)*)(?P<usage>u?)")
_NUMBERED_ID = re.compile(_NAME + r"(?P<positions>[0-9]{1,10}\.[0-9]{1,10})(?P<usage>)")


@dataclass(frozen=True, slots=True)
class Position:
    """How much of a choice the client has: the number of tokens, and whether it has the end. In a
    stream with numbered events, `num_events` counts instead."""

    num_tokens: int = 0
    has_ended: bool = False
    num_events: int = 0


NOTHING = Position()


class StreamIdentity(msgspec.Struct, frozen=True):
    """One stream, over all routers that serve it. `life` grows with every resumption, even from
    the same event: it is the milliseconds since the stream began.

    `restored` is the digest of prompts with ids of remembered answers; another life needs the same.
    `positions` says how much the client has of each choice; empty for a new stream. A stream that
    `numbers_events` has one choice. `terms` are those of the HTTP request at hand.
    """

    request_id: str
    created: int
    life: int = 0
    positions: tuple[Position, ...] = ()
    knows_usage: bool = False
    numbers_events: bool = False
    terms: RequestTerms = OPEN_TERMS
    restored: str = ""

    def position_of(self, choice: int) -> Position:
        """How much the client has of a choice."""
        return self.positions[choice] if choice < len(self.positions) else NOTHING


def resumed_identity(
    last_id: str, key: bytes, digest: bytes, now_s: float, numbers_events: bool = False
) -> StreamIdentity:
    """The stream that an event's id names, in a new life (`now_s`: since the Unix epoch).

    Raises InvalidRequest for a malformed id, and for an id that was not issued under `key` for a
    request with this `request_digest`.
    """
    found = (_NUMBERED_ID if numbers_events else _ID).fullmatch(last_id)
    if found is None:
        raise InvalidRequest(f"'{HEADER}' is not the id of an event of a stream", HEADER)
    if not hmac.compare_digest(_digest(found["name"], key, digest), found["digest"]):
        raise InvalidRequest(
            f"'{HEADER}' does not belong to this request: to resume a stream, send its request "
            "again with the same body and API key",
            HEADER,
        )
    positions = tuple(map(_position, found["positions"].split(",")))
    created = int(found["created"], 16)
    life = max(int(found["life"], 16) + 1, int((now_s - created) * 1000))
    request_id, knows_usage = found["request_id"], bool(found["usage"])
    return StreamIdentity(
        request_id,
        created,
        life,
        positions,
        knows_usage,
        numbers_events,
        restored=found["restored"] or "",
    )


def _position(text: str) -> Position:
    tokens, _, events = text.removesuffix("e").partition(".")
    return Position(int(tokens), text.endswith("e"), int(events or 0))


class Bookmark:
    """Tracks the client's position in a stream after each event."""

    def __init__(
        self, identity: StreamIdentity, num_choices: int, key: bytes, digest: bytes
    ) -> None:
        self._prefix = _prefix(identity, key, digest)
        self._known = [identity.position_of(choice) for choice in range(num_choices)]
        self._num_tokens = [each.num_tokens if each.has_ended else 0 for each in self._known]
        self._shown = [_shown(each) for each in self._known]
        self._suffix = b"u\n" if identity.knows_usage else b"\n"

    def advance(self, choice: int, num_tokens: int, has_ended: bool) -> bool:
        """Count `num_tokens` more tokens of a choice, starting with its first. Returns whether
        they, or the end, are new to the client."""
        before, known = self._num_tokens[choice], self._known[choice]
        self._num_tokens[choice] = before + num_tokens
        if before < known.num_tokens and not has_ended:
            return False
        shown = b"%de" if has_ended else b"%d"
        self._shown[choice] = shown % (before + num_tokens)
        return True

    def add_usage(self) -> None:
        """Mark that the next event carries the usage."""
        self._suffix = b"u\n"

    def marked(self, event: bytes) -> bytes:
        """The newest event, with its `id:` line."""
        return self._prefix + b",".join(self._shown) + self._suffix + event


class EventCount:
    """The counterpart of Bookmark for a stream of one choice with numbered events: a resumed
    stream makes all events again and leaves out those that the client has."""

    def __init__(self, identity: StreamIdentity, key: bytes, digest: bytes) -> None:
        self._prefix = _prefix(identity, key, digest)
        self._num_known = identity.position_of(0).num_events
        self._num_tokens = self._num_events = 0

    def advance(self, choice: int, num_tokens: int, has_ended: bool) -> bool:
        """See Bookmark; always True, since `marked` drops the events that are not new."""
        self._num_tokens += num_tokens
        return True

    def add_usage(self) -> None:
        """See Bookmark; does nothing, since the usage is an event like any other."""

    def marked(self, events: bytes) -> bytes:
        """See Bookmark; takes several whole events and returns the new ones."""
        marked: list[bytes] = []
        for event in events.split(_EVENT_END)[:-1]:
            self._num_events += 1
            if self._num_events > self._num_known:
                position = b"%d.%d\n" % (self._num_tokens, self._num_events)
                marked += (self._prefix, position, event, _EVENT_END)
        return b"".join(marked)


class Unmarked:
    """The counterpart of Bookmark for events without ids."""

    def advance(self, choice: int, num_tokens: int, has_ended: bool) -> bool:
        """See Bookmark; always True."""
        return True

    def add_usage(self) -> None:
        """See Bookmark; does nothing."""

    def marked(self, event: bytes) -> bytes:
        """See Bookmark; the event as it is."""
        return event


def request_digest(body: bytes, owner: str) -> bytes:
    """The digest of a request to which its event ids are bound. It covers the body and the sender
    (`http_kit.caller.owner_of`, at most 64 bytes), so that the ids are useless to others."""
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES, key=owner.encode()).digest()


def ids_key(cluster_secret: str) -> bytes:
    """The key of the ids, shared by all routers of a cluster and secret to everyone else."""
    return hashlib.blake2b(cluster_secret.encode(), digest_size=32, person=b"event ids").digest()


def _prefix(identity: StreamIdentity, key: bytes, of_request: bytes) -> bytes:
    """The common start of all `id:` lines of one life."""
    name = f"{identity.request_id}.{identity.created:x}.{identity.life:x}"
    if identity.restored:
        name += f"-{identity.restored}"
    return f"id: {name}.{_digest(name, key, of_request)}:".encode()


def _digest(name: str, key: bytes, of_request: bytes) -> str:
    data = name.encode() + b"\n" + of_request
    return hashlib.blake2b(data, key=key, digest_size=_DIGEST_BYTES).hexdigest()


def _shown(position: Position) -> bytes:
    return b"%d" % position.num_tokens + (b"e" if position.has_ended else b"")


def check_positions(identity: StreamIdentity, most_tokens: Sequence[int]) -> None:
    """Raises InvalidRequest unless there is one position per choice, within `most_tokens`."""
    if not identity.positions:
        return
    fits = len(identity.positions) == len(most_tokens) and all(
        position.num_tokens <= most
        for position, most in zip(identity.positions, most_tokens, strict=True)
    )
    if not fits:
        raise InvalidRequest(f"'{HEADER}' does not fit this request's choices", HEADER)


def check_restored(identity: StreamIdentity, restored: str) -> None:
    """Raises InvalidRequest unless the prompts of a resumed stream have the ids that they had."""
    if identity.restored != restored:
        raise InvalidRequest(
            f"'{HEADER}': the stream cannot be resumed, because earlier answers in its prompt are "
            "no longer remembered; send the request again without it",
            HEADER,
        )
