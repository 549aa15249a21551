"""The letters by which byte-level BPE writes bytes."""

from __future__ import annotations


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte, as GPT-2's byte-level BPE defines it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    stand_ins = {chr(byte): byte for byte in printable}
    stand_ins.update({chr(256 + rank): byte for rank, byte in enumerate(hidden)})
    return stand_ins
