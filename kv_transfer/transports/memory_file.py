"""Memory that several processes of one host map: a file without a name, in 2 MiB pages if possible.

On Linux the file is a memfd. Its size is sealed: if a holder could shrink it, the others would end
with SIGBUS. The size of /dev/shm does not limit it, and the kernel frees it with its last holder,
however the processes end. Elsewhere the file is a temporary one whose name is removed at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import tempfile
import time

from protocol.errors import ConfigError, TransferError

_HUGE = 1 << 21
_MADV_COLLAPSE = 25  # Linux 6.1
_MFD_NOEXEC_SEAL = 8  # Linux 6.3; some systems demand it
_SLICE = 32 * _HUGE
_COLLAPSE_S = 5.0
"""How long to wait for huge pages. In fragmented memory, the kernel may need milliseconds for
each."""


class SharedMemory:
    """`num_bytes` of zeroed memory; owns its file until `close`.

    `view` is this process's mapping; it lives until its last view is dropped. `file` is the open
    file to pass to peers, and `offset` is the place in the file where `view` starts.
    """

    def __init__(self, num_bytes: int) -> None:
        """Reserve and map the memory. Raises ConfigError if there is not enough."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + _HUGE
        try:
            self.file = _nameless_file(size)
        except OSError as error:
            raise _no_memory(num_bytes, error) from error
        try:
            self.view, self.offset = _map_for_huge_pages(self.file, num_bytes)
            _use_huge_pages(self.view)
            _reserve(self.file, size)
        except OSError as error:
            self.close()
            raise _no_memory(num_bytes, error) from error

    def close(self) -> None:
        """Close the file. Peers that have the file, and mappings, keep the memory."""
        os.close(self.file)


def map_shared(file: int, num_bytes: int) -> mmap.mmap:
    """Map the first `num_bytes` of a peer's file. Raises TransferError unless the file is memory of
    at least this size that nobody can shrink."""
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size < num_bytes:
            raise TransferError(f"a peer's memory has {status.st_size} bytes, expected {num_bytes}")
        if hasattr(fcntl, "F_GET_SEALS"):
            seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK:
                raise TransferError("the size of a peer's memory is not sealed")
        return mmap.mmap(file, num_bytes)
    except (OSError, ValueError) as error:
        raise TransferError(f"a peer's memory cannot be mapped: {error}") from error


def address_of(memory: mmap.mmap) -> int:
    """The start address of a mapping."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _nameless_file(size: int) -> int:
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as temporary:
            temporary.truncate(size)
            return os.dup(temporary.fileno())
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        file = os.memfd_create("baton-kv", flags | _MFD_NOEXEC_SEAL)
    except OSError:  # an older kernel
        file = os.memfd_create("baton-kv", flags)
    os.ftruncate(file, size)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _map_for_huge_pages(file: int, num_bytes: int) -> tuple[mmap.mmap, int]:
    """A mapping, and the offset in the file where it starts.

    A huge page needs an address and an offset that are equal modulo its size. Python cannot choose
    the address, but it can choose the offset. So the file is mapped twice, first to learn the
    address. If the kernel chooses another address the second time, pages stay plain.
    """
    first = mmap.mmap(file, num_bytes)
    offset = address_of(first) % _HUGE
    if offset == 0:
        return first, 0
    first.close()
    return mmap.mmap(file, num_bytes, offset=offset), offset


def _use_huge_pages(memory: mmap.mmap) -> None:
    """Back the memory with pages of 2 MiB where the kernel can, even if its settings for shared
    memory forbid them, because the settings only apply to memory without such a request. Elsewhere
    pages stay plain."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    start = -address_of(memory) % _HUGE
    end = start + (len(memory) - start) // _HUGE * _HUGE
    deadline = time.monotonic() + _COLLAPSE_S
    with contextlib.suppress(OSError):  # an older kernel, or no room
        memory.madvise(mmap.MADV_HUGEPAGE)
    for begin in range(start, end, _SLICE):
        if time.monotonic() > deadline:
            return
        stop = min(begin + _SLICE, end)
        for page in range(begin, stop, _HUGE):
            memory[page] = 0  # the kernel skips ranges that are wholly empty
        with contextlib.suppress(OSError):
            memory.madvise(_MADV_COLLAPSE, begin, stop - begin)


def _reserve(file: int, num_bytes: int) -> None:
    """Allocate the memory now, so that a host with too little says so at the start."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)


def _no_memory(num_bytes: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot reserve {num_bytes} bytes of shared memory: {error.strerror}; "
        "use fewer KV blocks (--num-blocks, --memory-fraction)"
    )
