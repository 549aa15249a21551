"""The base class of request schemas, and the bounds on what a body may hold.

Types are never coerced. Unknown fields are noted and dropped, see `gateway.api.unknown_fields`;
those that are null are absent, since clients send answers back with all the fields of their own
types. Validation stops at the first error of every list and dictionary, so that a bad body costs no
more than a good one.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from gateway.api.unknown_fields.ignorable_fields import note_unknown
from protocol.errors import InvalidRequest

MAX_LIST_ITEMS = 16_384
MAX_TOKEN_IDS = 1 << 20
MAX_PARTS = 100_000
MAX_VALUES = 1 << 17
"""The most values in a body without token ids."""
MAX_VALUES_WITH_IDS = MAX_TOKEN_IDS + 1024
MAX_BYTES_OUTSIDE = 1 << 24
"""The most bytes outside strings."""
MAX_DIGITS = 1000
"""The most digits of a number in a long body: converting one takes quadratic time in its length."""
MAX_ESCAPES = 3_000_000
"""The most escaped characters in strings: they are slow to parse, and other requests wait."""
SLICE_BYTES = 1 << 20
_DIGITS_ALIKE = bytes.maketrans(b"0123456789", b"0" * 10)
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)
PART_BYTES, VALUE_BYTES = 256, 48
"""Bytes of memory of a string, list or object, and of any value, in a request's fields."""

bounded = Field(max_length=MAX_LIST_ITEMS, fail_fast=True)
"""The field of a list that has no smaller limit of its own."""
first_error = Field(fail_fast=True)
"""The field of a list or dictionary that has a limit of its own."""


class StrictModel(BaseModel):
    """Base class of request schemas.

    With `refuses_unknown`, an unknown field is an error; with `constrains`, one that would
    constrain or limit the answer.
    """

    refuses_unknown: ClassVar[bool] = False
    constrains: ClassVar[bool] = False

    model_config = ConfigDict(
        strict=True,
        extra="allow",  # so that `note_unknown` sees them
        allow_inf_nan=False,
        frozen=True,
    )
    __pydantic_extra__: dict[
        str, Annotated[Any, PlainValidator(note_unknown, json_schema_input_type=Any)]
    ] = Field(init=False)


def check_bounds(body: bytes, max_values: int = MAX_VALUES) -> int:
    """Bytes of memory that the body's fields will take, estimated. Raises InvalidRequest for JSON
    with too many values or too long a number, before any of them becomes an object.

    Counts in C, slice by slice, so that other threads can run in between. The number of values is
    exact for valid JSON.
    """
    num_quotes = num_brackets = num_commas = num_outside = num_escapes = start = 0
    while start < len(body):
        part = _slice_of(body, start)
        start += len(part)
        if b"\\" in part:
            without = part.replace(b"\\\\", b"")
            num_escapes += (len(part) - len(without)) // 2 + without.count(b"\\")
            _check(num_escapes, MAX_ESCAPES, "escaped characters")
            part = without.replace(b'\\"', b"")
        is_inside = num_quotes % 2
        num_quotes += part.count(b'"')
        _check(num_quotes // 2, MAX_PARTS, "strings, lists and objects")
        outside = b"".join(part.split(b'"')[is_inside::2])
        if _LONG_NUMBER in outside.translate(_DIGITS_ALIKE):
            raise InvalidRequest(f"a number in the body has more than {MAX_DIGITS} digits")
        num_brackets += outside.count(b"[") + outside.count(b"{")
        num_commas += outside.count(b",")
        num_outside += len(outside)
    num_parts = num_quotes // 2 + num_brackets
    _check(num_parts, MAX_PARTS, "strings, lists and objects")
    _check(num_parts + num_commas, max_values, "values")
    _check(num_outside, MAX_BYTES_OUTSIDE, "bytes outside strings")
    return num_parts * PART_BYTES + (num_parts + num_commas) * VALUE_BYTES


def rough_memory(body: bytes) -> int:
    """A quick estimate for a short body, which also counts characters inside strings."""
    num_parts = body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")
    return num_parts * PART_BYTES + (num_parts + body.count(b",")) * VALUE_BYTES


def _slice_of(body: bytes, start: int) -> bytes:
    """The next slice; it does not end between a backslash and the escaped character."""
    part = body[start : start + SLICE_BYTES]
    num_backslashes = len(part) - len(part.rstrip(b"\\"))
    return body[start : start + SLICE_BYTES + 1] if num_backslashes % 2 else part


def _check(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise InvalidRequest(f"the body has {count} {what}; the limit is {limit}")
