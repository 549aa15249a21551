"""Which `traceparent` headers are taken, and what ours says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process.trace_context import read_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_the_trace_goes_on_in_a_span_of_ours() -> None:
    context = read_traceparent(f"00-{TRACE}-{SPAN}-01")
    assert context is not None
    assert (context.trace_id, context.parent_id, context.flags) == (TRACE, SPAN, "01")
    again = read_traceparent(context.traceparent)
    assert again is not None
    assert again.parent_id == context.span_id != SPAN


@pytest.mark.parametrize(
    ("header", "is_taken"),
    [
        (f"00-{TRACE}-{SPAN}-00", True),
        (f" 00-{TRACE}-{SPAN}-00\t", True),
        (f"01-{TRACE}-{SPAN}-00-more", True),
        (f"00-{TRACE}-{SPAN}-00-more", False),
        (f"ff-{TRACE}-{SPAN}-00", False),
        (f"00-{'0' * 32}-{SPAN}-00", False),
        (f"00-{TRACE}-{'0' * 16}-00", False),
        (f"00-{TRACE.upper()}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}", False),
        (f"00-{TRACE}-{SPAN}-0", False),
        ("", False),
    ],
)
def test_what_is_malformed_counts_as_absent(header: str, is_taken: bool) -> None:
    assert (read_traceparent(header) is not None) is is_taken


@given(st.text() | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{30,33}-[0-9a-f]{15,17}-[0-9a-f]{1,3}"))
def test_any_text_is_either_taken_or_not(header: str) -> None:
    context = read_traceparent(header)
    assert context is None or read_traceparent(context.traceparent) is not None
