"""The descriptor of a pool whose ranks' parts are reached through several ends."""

from __future__ import annotations

import msgspec

from protocol.errors import PoolMismatch

_MARK = b"joined"  # the descriptor of one end is a map, which begins with another byte
MAX_ENDS_OF_PEER = 64


class EndOfPool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One end, and its descriptor for the parts of the next `num_ranks` ranks."""

    agent: str
    num_ranks: int
    descriptor: bytes


_decoder = msgspec.msgpack.Decoder(list[EndOfPool])


def encode_ends(ends: list[EndOfPool]) -> bytes:
    """The descriptor of these ends, in the order of ranks."""
    return _MARK + msgspec.msgpack.encode(ends)


def ends_of(agent: str, descriptor: bytes) -> list[EndOfPool]:
    """The ends of a peer, of which `agent` is the first; `num_ranks` is 0 for the only end of a
    pool. Raises PoolMismatch if the descriptor cannot be used."""
    if not descriptor.startswith(_MARK):
        return [EndOfPool(agent, 0, descriptor)]
    try:
        ends = _decoder.decode(descriptor[len(_MARK) :])
    except (msgspec.DecodeError, ValueError) as error:
        raise PoolMismatch(f"a peer's descriptor cannot be used: {error}") from error
    names = [each.agent for each in ends]
    is_sound = 1 < len(set(names)) == len(ends) <= MAX_ENDS_OF_PEER
    if not is_sound or names[0] != agent or min(each.num_ranks for each in ends) < 1:
        raise PoolMismatch(f"the descriptor of agent {agent} names other ends: {names}")
    return ends
