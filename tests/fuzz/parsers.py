"""The parsers of remote input, as the fuzzing bench calls them.

Each takes bytes as received from a peer, runs the code that a process runs on them, and returns or
raises one of its declared errors. Any other exception is a bug.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from bench.tools.recorded_connection import RecordedConnection
from gateway.admission.gate import Gate
from gateway.api.anthropic.request import MessagesRequest
from gateway.api.body_reader import RequestBody, read_fields
from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai.completion_request import CompletionRequest
from gateway.api.openai_responses.request import ResponsesRequest
from gateway.api.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.http.byte_budget import ByteBudget
from gateway.http.connection import BoundedProtocol, BoundedProtocols
from gateway.http.connection_limits import ConnectionLimits
from gateway.http.request_scope import RequestScope
from gateway.metrics import ApiMetrics
from http_kit.disconnect import ClientConnection, offer_connection
from kv_transfer.authentication import authenticate_descriptor, verify_descriptor
from kv_transfer.handoff.key import HandoffKey
from kv_transfer.handoff.sink import HandoffSink
from process.store.ignored_entries import IgnoredEntries
from process.store.registry import FleetView
from protocol import control_message, events, handoff_messages, registration, wire
from protocol.errors import ProtocolError, RequestError
from tests.fuzz.inputs import BYTES_ONLY, JSON, MESSAGE_PACK, Codec
from tests.fuzz.seeds import BODIES, HEADS, example, variants

_SECRET = b"fuzz"
_SCHEMAS: dict[str, type[RequestBody]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@dataclass(frozen=True)
class Parser:
    """One parser: its valid inputs, their codec, and the errors that it may raise."""

    name: str
    seeds: Sequence[bytes]
    codec: Codec
    parse: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]


def parsers(loop: asyncio.AbstractEventLoop) -> list[Parser]:
    """Every parser of remote input except native code behind authentication.

    HTTP connections live on `loop`, which the caller closes.
    """
    return [
        *(_body_parser(path, schema) for path, schema in _SCHEMAS.items()),
        _frames("control frames", control_message.ControlMessage, wire.decode_control),
        _frames("event frames", events.EventMessage, wire.decode_event),
        _notifications(),
        _metadata(),
        _registrations(),
        _heads(loop),
    ]


class _BodyConnection:
    """The part of a client's connection that reading a body uses; a body of odd length comes in
    one piece."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def try_body(self, scope: Scope) -> bytes | None:
        """See ClientConnection."""
        return self._body if len(self._body) % 2 else None

    def has_body(self, scope: Scope) -> bool:
        """See ClientConnection."""
        return True


async def _at_once(work: Callable[[], Any]) -> Any:
    """Check a large body without a thread."""
    return work()


def _body_parser(path: str, schema: type[RequestBody]) -> Parser:
    """Parse a body inside the router's own request handling, up to the client's answer."""
    raised: list[Exception] = []

    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await read_fields(Request(scope, receive), schema, 1 << 20, _at_once)
        except Exception as error:
            raised.append(error)
            raise

    metrics, gate = ApiMetrics(CollectorRegistry()), Gate(1, time.monotonic)
    app = RequestScope(read, metrics, ByteBudget(None), gate)

    async def answer(message: Message) -> None:
        """Discard the answer."""

    def parse(body: bytes) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        raised.clear()
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        offer_connection(scope, cast(ClientConnection, _BodyConnection(body)))
        try:
            app(scope, receive, answer).send(None)
        except StopIteration:
            if raised:
                raise raised.pop() from None
            return
        raise AssertionError("reading a body that is all here waits for something")

    return Parser(f"body of {path}", BODIES[path], JSON, parse, (RequestError, HTTPException))


def _frames(name: str, union: Any, decode: Callable[[bytes], object]) -> Parser:
    seeds = [msgspec.msgpack.encode(each) for each in variants(union)]
    return Parser(name, seeds, MESSAGE_PACK, decode, (ProtocolError,))


def _notifications() -> Parser:
    """A transport's notifications, up to the handoff sink."""
    seeds = [
        msgspec.msgpack.encode(
            handoff_messages.KvWritten(request_id="r", attempt=1, first_block=first, num_blocks=2)
        )
        for first in (3, 5)
    ]

    def parse(payload: bytes) -> None:
        written = wire.decode_notification(payload)
        sink = HandoffSink("agent", ttl_s=3.0, landing_s=2.0)
        sink.ask(HandoffKey("r", 1), "peer", now=0.0)
        sink.begun(handoff_messages.KvBegun(request_id="r", attempt=1))
        sink.offer(HandoffKey("r", 1), 3, (7, 8, 9, 10), now=0.0)
        sink.written(written)

    return Parser("transfer notifications", seeds, MESSAGE_PACK, parse, (ProtocolError,))


def _metadata() -> Parser:
    """A peer's descriptor with its digest, up to the point where the transport would get it."""
    descriptor = bytes(range(200))
    digest = authenticate_descriptor(_SECRET, "agent", descriptor, 64)
    valid = handoff_messages.PeerDescriptor(
        transport="nixl", agent="agent", descriptor=descriptor, digest=digest, num_blocks=64
    )

    def parse(frame: bytes) -> None:
        found = wire.decode_control(frame)
        if not isinstance(found, handoff_messages.PeerDescriptor):
            raise ProtocolError("another message")
        verify_descriptor(_SECRET, found.agent, found.descriptor, found.num_blocks, found.digest)

    seeds = [msgspec.msgpack.encode(valid)]
    return Parser("KV metadata", seeds, MESSAGE_PACK, parse, (ProtocolError,))


def _registrations() -> Parser:
    """A worker's registration in the store, among valid ones."""
    addresses = {"control": "tcp://127.0.0.1:1", "events": "tcp://[::1]:65535"}
    valid = msgspec.structs.replace(example(registration.WorkerInfo), **addresses)
    seeds = [msgspec.json.encode(valid)]

    def parse(value: bytes) -> None:
        ignored = IgnoredEntries()
        FleetView(0.0, ignored).take([b"epoch", b"text", value], now=0.0)
        if ignored.counts.total():
            raise ProtocolError("counted and ignored")

    return Parser("Redis registrations", seeds, JSON, parse, (ProtocolError,))


def _heads(loop: asyncio.AbstractEventLoop) -> Parser:
    """Whole requests on a connection of the router's HTTP protocol, with an empty application."""
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    config = Config(_empty_app, ws="none", lifespan="off", log_config=None)
    config.load()
    factory = BoundedProtocols(ConnectionLimits(), CollectorRegistry()).factory()
    state = ServerState()

    async def converse(data: bytes) -> bytes:
        connection = RecordedConnection()
        protocol: BoundedProtocol = factory(config=config, server_state=state, app_state={})
        protocol.connection_made(connection)
        protocol.data_received(data)
        protocol.connection_lost(None)
        if state.tasks:
            await asyncio.wait(list(state.tasks))
        return connection.written[9:12]

    def parse(data: bytes) -> None:
        status = loop.run_until_complete(converse(data))
        if failures:
            raise AssertionError(f"unhandled: {failures.pop()}")
        if status.startswith(b"4"):
            raise ProtocolError(status.decode())
        if status.startswith(b"5"):
            raise AssertionError(f"answered {status!r}")

    return Parser("HTTP heads", HEADS, BYTES_ONLY, parse, (ProtocolError,))


async def _empty_app(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})
