"""Blocks that host memory gives up go to disk, and come back to host memory; what cannot be written
or read costs a computation."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.tiers.block_file import BlockFile
from kv_transfer.tiers.disk_folder import claim_file
from kv_transfer.tiers.disk_key import DiskScope
from kv_transfer.tiers.disk_tier import RETRY_S, DiskTier
from kv_transfer.tiers.kv_tiers import KvTiers
from kv_transfer.tiers.units import Units
from tests.unit.held_thread import HeldThread
from tests.unit.kv_transfer.tiers.test_host_tier import BYTES, Pool, chain

SCOPE = DiskScope("a secret of the cluster", "layout")
SLOT = 4096


class Tiers(Pool):
    """A pool of 4 blocks, host memory for 4 and a disk for `num_disk`."""

    def __init__(self, folder: Path, num_disk: int = 16, max_age_s: float = 1000.0) -> None:
        super().__init__(4, 4, max_age_s)
        self.wall = 5000.0
        size = 4096 + num_disk * SLOT
        fd = claim_file(folder, SCOPE)
        self.file = BlockFile(fd, SCOPE, BYTES, size, lambda: self.wall)
        self.disk_thread = HeldThread()
        self.disk = DiskTier(self.file, self.host, self.disk_thread, BYTES, max_age_s)  # type: ignore[arg-type]
        self.num_found = self.disk.restore(self.now, self.wall)
        self.tiers = KvTiers(self.pools, Units([BYTES]), self.host, self.disk)

    def push_down(self, names: list[bytes]) -> None:
        """Compute blocks, one after the other, and let others push them out of the pool."""
        for name in names:
            self.fill([name])
            for _ in range(3):
                self.turn()

    def raise_and_load(self, names: list[bytes]) -> list[bytes]:
        self.raise_blocks(names)
        self.turn()
        return self.load(names[: self.num_ready(names)])

    def raise_blocks(self, names: list[bytes]) -> int:
        """Begin to read blocks into host memory; the number of reads."""
        blocks = [(0, name) for name in names]
        return self.tiers.raise_blocks(blocks, lambda name, seconds: None, self.now)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(tmp_path)
    yield made
    made.tiers.close()


def names(count: int) -> list[bytes]:
    return [each.rjust(16, b"n") for each in chain("", count)]


def test_what_host_memory_gives_up_is_read_back(tiers: Tiers) -> None:
    known = names(10)
    tiers.push_down(known)
    assert tiers.num_ready(known[:1]) == 0
    assert tiers.tiers.num_on_disk((0, each) for each in known[:2]) == 2
    assert tiers.raise_and_load(known[:2]) == known[:2]
    assert tiers.disk.counts.num_loaded == 2
    assert tiers.disk.counts.num_failures == 0


def test_a_restarted_worker_finds_its_blocks_again(tmp_path: Path, tiers: Tiers) -> None:
    known = names(10)
    tiers.push_down(known)
    on_disk = set(tiers.disk.index.names())
    tiers.tiers.close()
    again = Tiers(tmp_path)
    assert again.num_found == len(on_disk) >= 5
    assert again.raise_and_load(known[:2]) == known[:2]
    again.tiers.close()


def test_blocks_that_are_too_old_after_a_restart_are_erased(tmp_path: Path) -> None:
    first = Tiers(tmp_path)
    first.push_down(names(6))
    first.tiers.close()
    fd = claim_file(tmp_path, SCOPE)
    file = BlockFile(fd, SCOPE, BYTES, 1 << 20, lambda: 0.0)
    thread = HeldThread()
    disk = DiskTier(file, first.host, thread, BYTES, 10.0)  # type: ignore[arg-type]
    assert disk.restore(0.0, first.wall + 11.0) == 0
    thread.finish()
    assert file.found() == []
    disk.close()


@pytest.mark.parametrize("position", [0, 2000])
def test_a_block_that_was_changed_on_disk_is_computed_again(
    tiers: Tiers, tmp_path: Path, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    known = names(10)
    tiers.push_down(known)
    path = next(tmp_path.glob("*/kv-blocks"))
    data = bytearray(path.read_bytes())
    for start in range(SLOT, len(data), SLOT):
        data[start + position % 40] ^= 1
    path.write_bytes(data)
    assert tiers.raise_and_load(known[:2]) == []
    assert not tiers.tiers.has(0, known[0])
    assert tiers.disk.counts.num_failures == 2
    assert caplog.text.count("could not be read") == 1
    tiers.host.index.check()
    tiers.disk.index.check()


def test_a_full_disk_costs_one_warning_and_what_is_there_goes_on(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = names(12)
    tiers.push_down(known[:8])
    held = len(tiers.disk.index)
    assert held > 2

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        tiers.push_down(known[8:])
    assert caplog.text.count("disk is full") == 1
    assert tiers.disk.index.num_slots <= held
    last = tiers.disk.index.names()[-1:]
    assert tiers.raise_and_load(last) == last
    tiers.disk.index.check()


def test_a_tier_grows_on_once_a_full_disk_has_room_again(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    known, pwrite, num_refused = names(40), os.pwrite, 0

    def full(*_: object) -> int:
        nonlocal num_refused
        num_refused += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    num_slots = tiers.disk.index.num_slots
    tiers.push_down(known[:8])
    held = len(tiers.disk.index)
    monkeypatch.setattr("os.pwrite", full)
    tiers.push_down(known[8:12])
    assert tiers.disk.index.num_slots <= held
    tiers.now += RETRY_S
    refused = num_refused
    tiers.push_down(known[12:16])
    assert num_refused == refused + 1, "one attempt, with one block"
    assert tiers.disk.index.num_slots <= held
    monkeypatch.setattr("os.pwrite", pwrite)
    tiers.push_down(known[16:18])
    assert tiers.disk.index.num_slots <= held, "not before the minute is over"
    tiers.now += RETRY_S
    tiers.push_down(known[18:])
    assert tiers.disk.index.num_slots == num_slots == len(tiers.disk.index)
    assert caplog.text.count("the disk has room again") == 1
    assert caplog.text.count("disk is full") == 1
    tiers.disk.index.check()


def test_a_block_that_was_withdrawn_while_it_was_read_does_not_come_back(tiers: Tiers) -> None:
    known = names(10)
    tiers.push_down(known)
    tiers.disk_thread.is_held = True
    assert tiers.raise_blocks(known[:1]) == 1
    assert tiers.tiers.is_near(0, known[0])
    tiers.tiers.drop(known[:1])
    tiers.disk_thread.is_held = False
    tiers.turn()
    assert not tiers.tiers.has(0, known[0])
    tiers.host.index.check()
    tiers.disk.index.check()


def test_a_block_that_was_withdrawn_while_it_was_written_is_not_found_again(tiers: Tiers) -> None:
    known = names(8)
    tiers.disk_thread.is_held = True
    tiers.push_down(known)
    tiers.disk_thread.run()
    tiers.tiers.drop(known)
    tiers.disk_thread.is_held = False
    assert {each.name for each in tiers.file.found()} & set(known), "they were written"
    tiers.turn()
    tiers.turn()
    assert not {each.name for each in tiers.file.found()} & set(known)
    tiers.disk.index.check()


def test_reads_leave_half_of_host_memory_alone(tiers: Tiers) -> None:
    known = names(12)
    tiers.push_down(known)
    assert tiers.raise_blocks(known[:4]) == 2
    tiers.turn()
    assert tiers.num_ready(known[:4]) == 2


def test_a_large_host_memory_is_not_looked_through_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.tiers.kv_tiers.MAX_WINDOW", 1)
    tiers = Tiers(tmp_path)
    tiers.push_down(names(10))
    in_both = [each for each in tiers.host.index.names() if each in tiers.disk.index]
    assert in_both == tiers.host.index.names()[:1]
    tiers.tiers.close()
