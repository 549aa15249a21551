"""Events of a stream by the pieces that it came in."""

from __future__ import annotations

import pytest

from bench.tools.raw_stream import RawStream
from protocol.errors import BatonError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = (
    b'b\r\ndata: {"a":1}\r\n\r\n\r\n'
    b'id: x\ndata: {"a":2}\n\n: a comment\n\ndata: {"a":3}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 7, 30, 1000])
def test_an_event_has_the_time_of_the_piece_with_its_end(size):
    whole = HEAD + BODY
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    stream = RawStream(pieces, [float(i) for i in range(len(pieces))])
    events = [(at, event.strip()) for at, event in stream.events()]
    assert [event for _, event in events] == [b'{"a":1}', b'{"a":2}', b'{"a":3}']
    for at, event in events:
        end = whole.index(event) + len(event)  # the line's end follows
        assert at in ((end - 1) // size, end // size, (end + 1) // size)


def test_one_that_breaks_off_says_so():
    stream = RawStream([HEAD + BODY[:-10]], [0.0])
    with pytest.raises(BatonError, match="broke off"):
        list(stream.events())


def test_one_that_is_refused_says_why():
    stream = RawStream([b"HTTP/1.1 503 Service Unavailable\r\n\r\nno workers"], [0.0])
    with pytest.raises(BatonError, match=r"503(.|\s)*no workers"):
        list(stream.events())
