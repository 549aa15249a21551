"""Which stream, or answer, an HTTP request is for: a new one, or one that another router began."""

from __future__ import annotations

import time

from fastapi import Request

from protocol.errors import InvalidRequest
from router.api.context import ApiContext
from router.api.request_fields import GenerationFields
from router.event_ids import HEADER, StreamIdentity, resumed_identity
from router.request_scope import record_of


def new_identity(request: Request) -> StreamIdentity:
    """That of the request's record, for endpoints whose streams cannot be resumed.

    Raises InvalidRequest for a request to resume one.
    """
    if HEADER in request.headers:
        raise InvalidRequest(f"'{HEADER}': streams of this endpoint cannot be resumed", HEADER)
    request_id = record_of(request.scope).request_id
    return StreamIdentity(request_id, int(time.time()), is_resumable=False)


def identify(request: Request, context: ApiContext, fields: GenerationFields) -> StreamIdentity:
    """That of the request's record, or with a `Last-Event-ID` of the stream that is resumed.

    Then the record takes the stream's id. Raises InvalidRequest for an id that is not of a stream
    of the same endpoint and body.
    """
    record = record_of(request.scope)
    last_id = request.headers.get(HEADER)
    if last_id is None:
        return StreamIdentity(record.request_id, int(time.time()))
    if not fields.stream:
        raise InvalidRequest(f"'{HEADER}' needs 'stream' to be true", HEADER)
    identity = resumed_identity(last_id, context.ids_key, record.body_digest, time.time())
    if identity.request_id.partition("-")[0] != record.request_id.partition("-")[0]:
        raise InvalidRequest(f"'{HEADER}' is of another endpoint", HEADER)
    record.request_id = identity.request_id
    return identity
