"""Memory without a name: zeroed, of fixed size, in huge pages where the kernel has some, and gone
with its last holder."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from pathlib import Path

import pytest

from kv_transfer.transports.memory_file import SharedMemory, address_of, map_shared
from protocol.errors import ConfigError, TransferError
from tests.processes import open_files

HUGE = 1 << 21
needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfds are Linux's")


def huge_bytes(address: int) -> int:
    """Bytes of the mapping at an address that are in huge pages."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    for each in filter(None, maps):
        start, end = (int(part, 16) for part in each.split()[0].split("-"))
        if start <= address < end:
            return 1024 * int(re.search(r"ShmemPmdMapped: +(\d+)", each)[1])  # type: ignore[index]
    raise AssertionError("nothing is mapped there")


def collapses() -> bool:
    """Whether this kernel makes huge pages of shared memory on request: Linux 6.1."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    has_huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").exists()
    return has_huge and version is not None and (int(version[1]), int(version[2])) >= (6, 1)


@pytest.mark.parametrize("num_bytes", [1, 4096, 100_001, 3 * HUGE])
def test_memory_is_zeroed_and_shared_from_its_offset_on(num_bytes: int) -> None:
    memory = SharedMemory(num_bytes)
    assert len(memory.view) == num_bytes
    assert not any(memory.view[:])
    theirs = map_shared(memory.file, memory.offset + num_bytes)
    memory.view[num_bytes - 1] = 7
    assert theirs[memory.offset + num_bytes - 1] == 7
    memory.close()
    theirs[memory.offset] = 9
    assert memory.view[0] == 9, "mappings outlive the file"
    theirs.close()
    memory.view.close()


@needs_memfd
def test_memory_has_no_name_and_cannot_be_resized() -> None:
    memory = SharedMemory(4096)
    assert os.readlink(f"/proc/self/fd/{memory.file}") == "/memfd:baton-kv (deleted)"
    assert not os.get_inheritable(memory.file)
    size = os.fstat(memory.file).st_size
    for other in (0, size - 1, size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.file, other)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    memory.close()
    memory.view.close()


@pytest.mark.skipif(not collapses(), reason="the kernel makes no huge pages of shared memory")
def test_memory_is_in_huge_pages() -> None:
    """Others may hold up the kernel for a moment, which then makes none."""
    found = []
    while max(found, default=0) < 7 * HUGE:
        assert len(found) < 20, found
        memory = SharedMemory(8 * HUGE + 12_345)
        assert memory.offset == address_of(memory.view) % HUGE
        found.append(huge_bytes(address_of(memory.view)))
        memory.close()
        memory.view.close()


def test_too_much_memory_is_refused_with_advice() -> None:
    files = open_files()
    with pytest.raises(ConfigError, match="use fewer KV blocks"):
        SharedMemory(1 << 60)
    assert open_files() <= files


@needs_memfd
def test_what_a_peer_must_not_map(tmp_path: Path) -> None:
    memory = SharedMemory(4096)
    size = os.fstat(memory.file).st_size
    with pytest.raises(TransferError, match=f"{size} bytes, expected {size + 1}"):
        map_shared(memory.file, size + 1)
    memory.close()
    memory.view.close()
    shrinkable = os.memfd_create("unsealed")
    os.ftruncate(shrinkable, mmap.PAGESIZE)
    with pytest.raises(TransferError, match="not sealed"):
        map_shared(shrinkable, 1)
    os.close(shrinkable)
    reader, writer = os.pipe()
    with pytest.raises(TransferError, match="0 bytes"):
        map_shared(reader, 1)
    os.close(reader)
    os.close(writer)
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(4096)
        with pytest.raises(TransferError, match="cannot be mapped"):
            map_shared(file.fileno(), 1)
