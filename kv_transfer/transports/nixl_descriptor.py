"""The descriptor of a pool that peers write to over NIXL, and NIXL's names for its memory.

A decoded descriptor is whole and agrees with itself. Whether it fits our pool is checked by
`fit_groups`. `metadata` goes to NIXL unread.
"""

from __future__ import annotations

import msgspec

from kv_transfer.transports.interface import PoolMemory, PoolPart, PoolShape
from protocol.errors import ConfigError, PoolMismatch


class NixlDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The data that a peer needs to write here; `metadata` is NIXL's own. `parts` are the ranks'
    parts of the pool, and `ports` are the ports on which UCX listens. `views` as in
    `PoolMemory`."""

    metadata: bytes
    parts: list[PoolPart]
    num_blocks: int
    ports: tuple[int, ...] = ()
    views: tuple[tuple[int, int], ...] = ()

    @property
    def pool(self) -> PoolMemory:
        """The pool, in the peer's address space."""
        first, *others = self.parts
        return PoolMemory(
            first.address,
            first.block_bytes,
            self.num_blocks,
            first.device,
            tuple(others),
            self.views,
        )

    @property
    def shapes(self) -> list[PoolShape]:
        """The pool's shape as blocks of each group."""
        return [each.shape for each in self.pool.groups]


def decode_descriptor(descriptor: bytes) -> NixlDescriptor:
    """Raises PoolMismatch if a peer's descriptor is malformed or contradicts itself."""
    try:
        pool = msgspec.msgpack.decode(descriptor, type=NixlDescriptor)
        segments = {segment_of(part.device)[0] for part in pool.parts}
        has_memory = min((part.address for part in pool.parts), default=0) > 0
        is_sound = len(segments) == 1 and has_memory and pool.pool.is_sound
    except (msgspec.DecodeError, ConfigError) as error:
        raise PoolMismatch(f"a peer's descriptor cannot be used: {error}") from error
    if len(segments) != 1:
        raise PoolMismatch("a peer's descriptor has parts in several kinds of memory, or none")
    if not is_sound:
        raise PoolMismatch("a peer's descriptor has a pool without memory, or contradicts itself")
    return pool


def segment_of(device: str) -> tuple[str, int]:
    """NIXL's memory type and the index of the device. Raises ConfigError."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return "DRAM", 0
    if kind == "cuda" and (index or "0").isdigit():
        return "VRAM", int(index or "0")
    raise ConfigError(f"the nixl transport does not serve device {device!r}")
