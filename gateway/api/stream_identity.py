"""Identifies an HTTP request's stream or answer: a new one, or a stream that is resumed."""

from __future__ import annotations

import time

from fastapi import Request
from msgspec.structs import replace

from gateway.api.context import ApiContext
from gateway.api.generation_fields import GenerationFields
from gateway.http.request_scope import record_of
from gateway.output.event_ids import HEADER, StreamIdentity, resumed_identity
from protocol.errors import InvalidRequest

_LAST_EVENT_ID = HEADER.lower().encode()
_NUM_DIGITS = 32


def identify(
    request: Request, context: ApiContext, fields: GenerationFields, numbers_events: bool = False
) -> StreamIdentity:
    """A new identity from the request's record, or with `Last-Event-ID` that of a resumed stream.

    The record of a resumed stream takes the stream's id. Raises InvalidRequest for an event id
    that does not belong to a stream of the same endpoint, body and key, and for a malformed time to
    wait.
    """
    record = record_of(request.scope)
    terms = record.terms()
    last_id = record.header(_LAST_EVENT_ID)
    if last_id is None:
        created = int(time.time())
        return StreamIdentity(
            record.request_id, created, numbers_events=numbers_events, terms=terms
        )
    if not fields.stream:
        raise InvalidRequest(f"'{HEADER}' needs 'stream' to be true", HEADER)
    now_s, digest = time.time(), record.request_digest
    identity = resumed_identity(last_id, context.ids_key, digest, now_s, numbers_events)
    if identity.request_id[:-_NUM_DIGITS] != record.request_id[:-_NUM_DIGITS]:
        raise InvalidRequest(f"'{HEADER}' belongs to a stream of another endpoint", HEADER)
    record.request_id = identity.request_id
    return replace(identity, terms=terms)
