"""Bounds of the fields of messages and registrations, as types that the decoder checks.

Whatever a peer sends, only values that an honest process may send become objects: no negative
counts, no NaN, no endless texts and lists. The bounds are wide: limits of a model or a pool are
checked where they are known.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_COUNT = 2**53
MAX_TOKENS = 1 << 22
MAX_REASON_CHARS = 65_536
MAX_DIMENSION = 2**31 - 1
MAX_DURATION = 1e15

Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
RequestId = Annotated[str, Meta(max_length=1024)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
Endpoint = Annotated[str, Meta(pattern=r"^tcp://[^\s/]{1,256}:[0-9]{1,5}$")]

Pid = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Size = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Signed = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
Dimension = Annotated[int, Meta(ge=0, le=MAX_DIMENSION)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TtlMs = Annotated[int, Meta(ge=0, le=86_400_000)]

Duration = Annotated[float, Meta(ge=0, le=MAX_DURATION)]
Logprob = Annotated[float, Meta(le=1e30)]
"""A log-probability: not NaN; -inf for tokens that cannot be chosen."""
Number = Annotated[float, Meta(ge=-1e30, le=1e30)]

Hash = Annotated[bytes, Meta(max_length=64)]
Blob = Annotated[bytes, Meta(max_length=1 << 20)]
Packed = Annotated[bytes, Meta(max_length=1 << 26)]

Hashes = Annotated[list[Hash], Meta(max_length=MAX_TOKENS)]
Counts = Annotated[dict[Text, Count], Meta(max_length=16_384)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
