"""Encoding and decoding of messages; the only place where remote bytes become objects.

Bytes that cannot be decoded raise ProtocolError with a reason, and no other error. A long message
travels as several frames. ZeroMQ allocates memory for a frame before the peer has proved the
secret, hence the limit of a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from protocol.control_message import ControlMessage
from protocol.errors import ProtocolError
from protocol.events import EventMessage
from protocol.handoff_messages import KvWritten
from protocol.message_base import Message
from protocol.rank_messages import ToHead, ToNode
from protocol.registration import WorkerInfo

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_FRAME_BYTES = 64 * 1024
_PART_BYTES = 32 * 1024

_encoder = msgspec.msgpack.Encoder()
_control = msgspec.msgpack.Decoder(ControlMessage)
_event = msgspec.msgpack.Decoder(EventMessage)
_notification = msgspec.msgpack.Decoder(KvWritten)
_to_head = msgspec.msgpack.Decoder(ToHead)
_to_node = msgspec.msgpack.Decoder(ToNode)
_worker_info = msgspec.json.Decoder(WorkerInfo)


def encode(message: Message) -> bytes:
    """MessagePack of any message."""
    return _encoder.encode(message)


def parts(encoded: bytes) -> list[bytes]:
    """The frames of an encoded message: one, unless it is long."""
    if len(encoded) <= _PART_BYTES:
        return [encoded]
    return [encoded[i : i + _PART_BYTES] for i in range(0, len(encoded), _PART_BYTES)]


def joined(frames: Sequence[bytes]) -> bytes:
    """The encoded message in these frames. Raises ProtocolError if they are not the parts of one,
    or if it is too long."""
    if len(frames) == 1:
        return frames[0]
    *whole, last = frames
    if not last or any(len(each) != _PART_BYTES for each in whole):
        raise ProtocolError(f"{len(frames)} frames are not the parts of one message")
    size = sum(map(len, frames))
    if size > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {size} bytes exceeds {MAX_MESSAGE_BYTES}")
    return b"".join(frames)


def decode_control(frame: bytes) -> ControlMessage:
    """A message of the control plane. Raises ProtocolError."""
    message: ControlMessage = _decode(_control, frame, "control frame")
    return message


def decode_event(frame: bytes) -> EventMessage:
    """A message of the event plane (PUB). Raises ProtocolError."""
    message: EventMessage = _decode(_event, frame, "event frame")
    return message


def decode_notification(frame: bytes) -> KvWritten:
    """A transport's notification. Raises ProtocolError."""
    message: KvWritten = _decode(_notification, frame, "notification")
    return message


def decode_to_head(frame: bytes) -> ToHead:
    """A message from a node to the head of its worker. Raises ProtocolError."""
    message: ToHead = _decode(_to_head, frame, "message of a node")
    return message


def decode_to_node(frame: bytes) -> ToNode:
    """A message from the head of a worker to one of its nodes. Raises ProtocolError."""
    message: ToNode = _decode(_to_node, frame, "message of the head")
    return message


def encode_worker_info(info: WorkerInfo) -> bytes:
    """JSON, so that an operator can read the registration in Redis."""
    return msgspec.json.encode(info)


def decode_worker_info(value: bytes) -> WorkerInfo:
    """A worker's registration. Raises ProtocolError."""
    info: WorkerInfo = _decode(_worker_info, value, "worker registration")
    return info


def _decode(decoder: Any, frame: bytes, what: str) -> Any:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{what} of {len(frame)} bytes exceeds {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what} cannot be decoded: {error}") from error
