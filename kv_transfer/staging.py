"""A small pool with a transport of its own, for bytes that are not KV blocks.

Owns the transport and the pool's memory until `close`. One thread calls everything. A peer may
still write into the pool of a receiver that has given up, so such a pool stays open.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

from kv_transfer.transports.interface import PoolMemory, Transport
from protocol.errors import ConfigError, TransferError


class StagingPool:
    """`num_blocks` blocks of `block_bytes` in host memory; peers write by `transport`."""

    def __init__(
        self, open_transport: Callable[[], Transport], block_bytes: int, num_blocks: int
    ) -> None:
        """Raises TransferError if the transport does not open."""
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        try:
            self.transport = open_transport()
        except ConfigError as error:
            raise TransferError(str(error)) from error
        try:
            memory = self.transport.allocate(block_bytes * num_blocks)
            view = mmap.mmap(-1, block_bytes * num_blocks) if memory is None else memory.view
            self._memory = memoryview(view)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self.transport.register(PoolMemory(address, block_bytes, num_blocks, "cpu"))
        except ConfigError as error:
            self.transport.close()
            raise TransferError(str(error)) from error
        except TransferError:
            self.transport.close()
            raise

    def block(self, number: int) -> memoryview:
        """The bytes of a block."""
        return self._memory[number * self.block_bytes : (number + 1) * self.block_bytes]

    def close(self) -> None:
        """Close the transport. Peers must have stopped writing. A second call does nothing."""
        self.transport.close()
