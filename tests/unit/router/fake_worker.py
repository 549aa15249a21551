"""A worker that speaks the real protocol over real sockets and does what a test says."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from process.sockets.encrypted_sockets import Network
from protocol.message_base import Message
from protocol.messages import (
    PROTOCOL_VERSION,
    CacheDump,
    CacheDumpRequest,
    FinishReason,
    FirstToken,
    Hello,
    HelloAccepted,
    HelloRefused,
    Ping,
    Pong,
    Role,
    SequenceTokens,
    StepTokens,
)
from protocol.registration import WorkerInfo, WorkerState
from protocol.traces import PrefillTrace
from protocol.wire import decode_control, encode

T = TypeVar("T", bound=Message)
WAIT_S = 60.0
SECRET = "the secret of a test's cluster"


@dataclass
class Received:
    """Messages by type, in order of arrival."""

    queues: dict[type, asyncio.Queue] = field(default_factory=lambda: defaultdict(asyncio.Queue))

    async def next(self, kind: type[T]) -> T:
        async with asyncio.timeout(WAIT_S):
            return await self.queues[kind].get()

    def count(self, kind: type) -> int:
        return self.queues[kind].qsize()


class FakeWorker:
    """ROUTER and XPUB sockets; answers hellos, pings and dump requests by itself."""

    def __init__(self, network: Network, worker_id: str, role: Role, **info) -> None:
        self.control, control = network.listening(zmq.ROUTER, "tcp://127.0.0.1:*")
        self.events, events = network.listening(zmq.XPUB, "tcp://127.0.0.1:*")
        known = {
            "worker_id": worker_id,
            "incarnation": f"{worker_id}-1",
            "role": role,
            "state": WorkerState.READY,
            "host": "127.0.0.1",
            "pid": 1,
            "control": control,
            "events": events,
            "protocol_version": PROTOCOL_VERSION,
            "model": "model",
            "model_fingerprint": "weights",
            "layout_fingerprint": "layout",
            "transport": "nixl",
            "transport_paths": ("CMA", "TCP"),
            "block_size": 4,
            "num_blocks": 1000,
            "max_context": 2048,
        }
        self.info = WorkerInfo(**(known | info))
        self.received = Received()
        self.refusal: HelloRefused | None = None
        self.answers_pings = True
        self.answers_dumps = True
        self.dump = CacheDump(incarnation=self.info.incarnation, seq=0, hashes=[])
        self.router: bytes | None = None
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            self.router, frame = await self.control.recv_multipart()
            message = decode_control(frame)
            self.received.queues[type(message)].put_nowait(message)
            if isinstance(message, Hello):
                self.send(self.refusal or self._accepted())
            elif isinstance(message, Ping) and self.answers_pings:
                self.send(Pong(nonce=message.nonce))
            elif isinstance(message, CacheDumpRequest) and self.answers_dumps:
                self.send(self.dump_piece(message))

    def dump_piece(self, asked: CacheDumpRequest, most: int | None = None) -> CacheDump:
        """The piece of `dump` that a router asks for, of at most so many hashes."""
        end = len(self.dump.hashes) if most is None else asked.first + most
        return msgspec.structs.replace(
            self.dump,
            hashes=self.dump.hashes[asked.first : end],
            nonce=asked.nonce,
            first=asked.first,
            is_last=end >= len(self.dump.hashes),
        )

    def _accepted(self) -> HelloAccepted:
        return HelloAccepted(worker_id=self.info.worker_id, incarnation=self.info.incarnation)

    def send(self, message: Message) -> None:
        self.send_frames(encode(message))

    def send_frames(self, *frames: bytes) -> None:
        assert self.router is not None
        self.control.send_multipart([self.router, *frames], zmq.DONTWAIT)

    def publish(self, message: Message) -> None:
        self.events.send(encode(message), zmq.DONTWAIT)

    async def subscribed(self) -> None:
        async with asyncio.timeout(WAIT_S):
            assert await self.events.recv() == b"\x01"

    async def close(self) -> None:
        """Close all sockets, as if the process were killed."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self.control.close(linger=0)
        self.events.close(linger=0)

    # -- what workers say about a request ---------------------------------------------------

    def first_token(
        self, leg, token_id: int, *, finish: FinishReason | None = None, told=None, **trace
    ) -> None:
        self.send(
            FirstToken(
                request_id=leg.request_id,
                attempt=leg.attempt,
                index=leg.num_output,
                token_id=token_id,
                prompt_logprobs=told,
                finish=finish,
                trace=prefill_trace(self.info.worker_id, **trace),
            )
        )

    def tokens(self, leg, index: int, token_ids: list[int], **fields) -> None:
        sequence = SequenceTokens(
            request_id=leg.request_id,
            attempt=leg.attempt,
            index=index,
            token_ids=token_ids,
            **fields,
        )
        self.send(StepTokens(sequences=[sequence]))


def prefill_trace(worker_id: str, **fields) -> PrefillTrace:
    known = {"received_us": 1000, "scheduled_us": 3000, "cached_tokens": 0, "chunks": ()}
    return PrefillTrace(worker_id=worker_id, **(known | fields))
