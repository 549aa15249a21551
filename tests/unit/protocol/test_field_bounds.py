"""Every field of every message has bounds, so that no peer sends numbers or sizes that no honest
process would."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import pytest
from msgspec import inspect

from protocol import wire
from protocol.control_message import ControlMessage
from protocol.errors import ProtocolError
from protocol.events import EventMessage, WorkerStats
from protocol.handoff_messages import KvAsk, KvGrant, KvWritten
from protocol.messages import FlightRequest, Prefill, SequenceTokens, SetLimits, StepTokens
from protocol.registration import WorkerInfo
from protocol.sampling import TokenLogprobs
from protocol.traces import DecodeTrace
from tests.effort import NIGHTLY
from tests.fuzz.seeds import example
from tests.hostile.members.lies import lies

UNBOUNDED = {"sampling.seed"}
"""Every number of 64 bits is a seed."""
MESSAGES = [*ControlMessage.__args__, *EventMessage.__args__, KvWritten, WorkerInfo]


def unbounded(kind: inspect.Type, path: str) -> Iterator[str]:
    """The fields below this type that have no bounds."""
    if not is_bounded(kind):
        yield path
    match kind:
        case inspect.StructType(fields=fields):
            for each in fields:
                yield from unbounded(each.type, f"{path}.{each.name}")
        case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
            for each in types:
                yield from unbounded(each, path)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            yield from unbounded(item, f"{path}[]")
        case inspect.DictType(key_type=key, value_type=value):
            yield from unbounded(key, f"{path}{{}}")
            yield from unbounded(value, f"{path}{{}}")


def is_bounded(kind: inspect.Type) -> bool:
    """Whether a type's own values have bounds. A number's upper bound keeps NaN out, too."""
    match kind:
        case inspect.IntType(ge=low, le=high):
            return low is not None and high is not None
        case inspect.FloatType(le=high):
            return high is not None
        case inspect.StrType(max_length=most, pattern=pattern):
            return most is not None or pattern is not None
        case (
            inspect.BytesType(max_length=most)
            | inspect.ListType(max_length=most)
            | inspect.VarTupleType(max_length=most)
            | inspect.DictType(max_length=most)
        ):
            return most is not None
    return True


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: each.__name__)
def test_every_field_has_bounds(message: type[msgspec.Struct]) -> None:
    found = {each.removeprefix(".") for each in unbounded(inspect.type_info(message), "")}
    assert found - UNBOUNDED == set()


STATS = example(WorkerStats)
SEQUENCE = SequenceTokens(request_id="r", attempt=1, index=0, token_ids=[1])


@pytest.mark.parametrize(
    "lie",
    [
        msgspec.structs.replace(STATS, step_fixed_us=math.nan),
        msgspec.structs.replace(STATS, blocks_used=-1),
        msgspec.structs.replace(STATS, counters={str(place): 1 for place in range(20_000)}),
        SetLimits(itl_target_ms=math.inf),
        FlightRequest(nonce=1, after=2**63),
        StepTokens(sequences=[msgspec.structs.replace(SEQUENCE, token_ids=[-1])]),
        StepTokens(sequences=[msgspec.structs.replace(SEQUENCE, index=2**64 - 1)]),
        StepTokens(
            sequences=[msgspec.structs.replace(SEQUENCE, logprobs=[TokenLogprobs(math.nan)])]
        ),
        msgspec.structs.replace(example(Prefill), request_id="r" * 2000),
    ],
    ids=repr,
)
def test_what_no_honest_process_sends_is_no_message(lie: msgspec.Struct) -> None:
    decode = wire.decode_event if isinstance(lie, WorkerStats) else wire.decode_control
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(lie))


def test_steps_that_cannot_be_unpacked_are_no_trace() -> None:
    made = msgspec.to_builtins(DecodeTrace(worker_id="d", received_us=1), builtin_types=(bytes,))
    with pytest.raises(msgspec.ValidationError, match="whole number of steps"):
        msgspec.convert(made | {"steps": b"123"}, DecodeTrace)


def test_a_long_list_is_refused_by_its_header() -> None:
    """Its items are never read: the announced ones are not even there."""
    frame = b"\x82\xa4type\xa8Generate\xa9token_ids\xdd\x7f\xff\xff\xff"
    with pytest.raises(ProtocolError, match="length"):
        wire.decode_control(frame)


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x91" * 60_000,
        b"\x81\xa4type" * 10_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xc7\x05\x01hello",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\x82\xa4type\xaaStepTokens\xa9sequences" + b"\x91" * 30_000,
        b"\x82\xa4type\xaaStepTokens\xa9sequences\xd6\xff\x00\x00\x00\x00",
        b"\x81\xa4type\xc1",
    ],
)  # fmt: skip
def test_bombs_of_message_pack_are_refused(bomb: bytes) -> None:
    """Deep nesting, sizes that nothing follows, and types beyond ours."""
    for decode in (wire.decode_control, wire.decode_event, wire.decode_notification):
        with pytest.raises(ProtocolError):
            decode(bomb)


def test_a_lie_is_refused_or_a_message() -> None:
    """No lie raises another error while it is decoded."""
    decoded = 0
    for _, frame in lies(ControlMessage if NIGHTLY else KvGrant | KvAsk):
        try:
            wire.decode_control(frame)
            decoded += 1
        except ProtocolError:
            pass
    assert decoded, "lies that only the receiver can tell"
