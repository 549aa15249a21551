"""What a router tells the other routers: the requests that it has sent to workers.

Pure. A worker reports its load only when a step ends, so until then only its router knows of a
request. Messages may be lost, late or doubled. Each lists the requests that no report of the worker
has counted yet. Receivers reserve their load until the worker's own reports count them; until then
a lost request counts as far as `unseen_load` can guess it, and a doubled one counts twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.field_bounds import Count, Dimension, Name, Text

MOST_REQUESTS = 4096


class SentRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The `number`th request of a session: prompt tokens to compute, blocks to hold."""

    number: Count
    tokens: Dimension
    blocks: Dimension


class SentRequests(msgspec.Struct, frozen=True, array_like=True):
    """The requests that a router has sent to a worker in its `session` there, from number `first`
    to `last`. Requests that the worker has reported, or that are over, are not listed."""

    worker_id: Name
    session: Text
    first: Count
    last: Count
    requests: Annotated[list[SentRequest], Meta(max_length=MOST_REQUESTS)]


_decoder = msgspec.msgpack.Decoder(list[SentRequests])


def encode(sent: Sequence[SentRequests]) -> bytes:
    """One message about several workers."""
    return msgspec.msgpack.encode(sent)


def decode(message: bytes) -> list[SentRequests]:
    """The content of a message. Raises msgspec.DecodeError."""
    return _decoder.decode(message)
