"""Decodes compressed bodies within the limit on a body's length.

Knows gzip, deflate and zstd, one at a time. Nothing is decoded beyond the limit, however small the
compressed body is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import zstandard
from starlette.exceptions import HTTPException

MAX_WINDOW_BYTES = 1 << 23
"""The most memory that a zstd body may ask its reader to keep, as RFC 8878 recommends."""
MAX_GZIP_MEMBERS = 1024
_PART_BYTES = 1 << 16
_GZIP_BITS, _RAW_BITS = 31, -15


def decoder_of(encoding: str) -> Callable[[bytes, int], bytes] | None:
    """The decoder for bodies with this `Content-Encoding`; None if the body is not encoded. A
    decoder takes the body and the most bytes to return. Raises HTTPException 415 for other
    encodings.

    The decoder raises HTTPException 400 for a malformed body, and 413 for one that is too long.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    decode = _DECODERS.get(name)
    if decode is None:
        known = ", ".join(_DECODERS)
        raise HTTPException(
            415, f"the content encoding must be one of {known}", {"accept-encoding": known}
        )

    def bounded(body: bytes, max_bytes: int) -> bytes:
        try:
            decoded = decode(body, max_bytes + 1)
        except (zlib.error, zstandard.ZstdError) as error:
            raise HTTPException(400, f"the body is not valid {name}: {error}") from error
        if len(decoded) > max_bytes:
            raise HTTPException(413, f"the decoded body exceeds {max_bytes} bytes")
        return decoded

    return bounded


def _gunzip(body: bytes, most: int) -> bytes:
    """All members of a gzip file. Reads it part by part, because the end of each member copies the
    rest of a part. Members may be empty, so their number is limited, too."""
    rest, decoded, num_members = memoryview(body), bytearray(), 0
    reader = None
    while rest and len(decoded) < most:
        if reader is None:
            num_members += 1
            if num_members > MAX_GZIP_MEMBERS:
                raise zlib.error(f"it has more than {MAX_GZIP_MEMBERS} members")
            reader = zlib.decompressobj(_GZIP_BITS)
        part = rest[:_PART_BYTES]
        decoded += reader.decompress(part, most - len(decoded))
        rest = rest[len(part) - len(reader.unused_data) - len(reader.unconsumed_tail) :]
        if reader.eof:
            reader = None
    if reader is not None and len(decoded) < most:
        raise zlib.error("it ends too early")
    return bytes(decoded)


def _inflate(body: bytes, most: int) -> bytes:
    """Decodes zlib's format or, as many clients write it, deflate without a frame."""
    try:
        reader = zlib.decompressobj()
        decoded = reader.decompress(body, most)
    except zlib.error:
        reader = zlib.decompressobj(_RAW_BITS)
        decoded = reader.decompress(body, most)
    if not reader.eof and len(decoded) < most:
        raise zlib.error("it ends too early")
    return decoded


def _unzstd(body: bytes, most: int) -> bytes:
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    with reader.stream_reader(body, read_across_frames=True) as stream:
        return stream.read(most)


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _inflate,
    "zstd": _unzstd,
}
