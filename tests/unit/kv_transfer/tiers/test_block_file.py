"""Blocks on disk are unreadable without the secret, are served as they were written or not at all,
and are found again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.tiers.block_file import PAGE, BlockFile
from kv_transfer.tiers.disk_folder import FILE_NAME, claim_file
from kv_transfer.tiers.disk_key import DiskScope, ForgedBlock
from protocol.errors import ConfigError

BYTES = 5000
SCOPE = DiskScope("a secret of the cluster", "layout of the model")
A, B = b"a" * 16, b"b" * 16


class Disk:
    """The files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1_000.0

    @property
    def path(self) -> Path:
        return self.folder / "worker-0" / FILE_NAME

    def open(self, scope: DiskScope = SCOPE, max_bytes: int = 1 << 20) -> BlockFile:
        return BlockFile(claim_file(self.folder, scope), scope, BYTES, max_bytes, lambda: self.now)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "tiers")


def block(letter: str) -> memoryview:
    return memoryview(bytearray(letter.encode() * BYTES))


def read(file: BlockFile, slot: int, digest: bytes) -> bytes:
    into = memoryview(bytearray(BYTES))
    file.read(slot, digest, into)
    return bytes(into)


def test_a_block_is_read_as_it_was_written_also_by_a_later_process(disk: Disk) -> None:
    file = disk.open()
    file.write(3, A, block("x"))
    disk.now += 5
    file.write(0, B, block("y"))
    assert read(file, 3, A) == bytes(block("x"))
    file.close()
    again = disk.open()
    assert not again.is_foreign
    assert [(e.slot, e.name, e.written_s) for e in again.found()] == [(0, B, 1005), (3, A, 1000)]
    assert read(again, 3, A) == bytes(block("x"))
    again.close()


def test_nothing_of_a_block_lies_there_in_clear_and_nobody_else_may_look(disk: Disk) -> None:
    file = disk.open()
    file.write(0, A, block("x"))
    assert b"xxxx" not in disk.path.read_bytes()
    assert disk.path.stat().st_mode & 0o777 == 0o600
    assert disk.path.parent.stat().st_mode & 0o777 == 0o700
    disk.path.chmod(0o644)
    disk.path.parent.chmod(0o755)
    file.close()
    disk.open().close()
    assert disk.path.stat().st_mode & 0o777 == 0o600
    assert disk.path.parent.stat().st_mode & 0o777 == 0o700


def flip(position: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[PAGE + position] ^= 1

    return change


def swap(data: bytearray) -> None:
    size = (len(data) - PAGE) // 2
    first, second = data[PAGE : PAGE + size], data[PAGE + size :]
    data[PAGE:] = second + first


@pytest.mark.parametrize(
    "change",
    [
        flip(2),  # the hash
        flip(17),  # the time
        flip(30),  # the nonce
        flip(100),  # the block
        flip(36 + BYTES + 15),  # the tag
        swap,
        lambda data: data.__delitem__(slice(PAGE + 300, None)),
    ],
)
def test_what_was_changed_is_never_served(disk: Disk, change: Callable[[bytearray], None]) -> None:
    file = disk.open()
    file.write(0, A, block("x"))
    file.write(1, B, block("y"))
    data = bytearray(disk.path.read_bytes())
    change(data)
    disk.path.write_bytes(data)
    with pytest.raises(ForgedBlock):
        read(file, 0, A)
    file.close()


def test_a_block_copied_under_another_hash_is_not_served(disk: Disk) -> None:
    file = disk.open()
    file.write(0, A, block("x"))
    data = bytearray(disk.path.read_bytes())
    data[PAGE : PAGE + 16] = B
    disk.path.write_bytes(data)
    with pytest.raises(ForgedBlock):
        read(file, 0, B)
    file.close()


@pytest.mark.parametrize(
    "other",
    [
        replace(SCOPE, secret="another secret, as long"),
        replace(SCOPE, layout_fingerprint="layout of another model"),
    ],
)
def test_a_file_of_another_secret_or_model_is_emptied(disk: Disk, other: DiskScope) -> None:
    file = disk.open()
    file.write(0, A, block("x"))
    file.close()
    again = disk.open(other)
    assert again.is_foreign
    assert again.found() == []
    assert disk.path.stat().st_size == PAGE
    again.close()


def test_a_file_that_is_no_file_of_blocks_is_emptied(disk: Disk) -> None:
    disk.open().close()
    disk.path.write_bytes(b"something else" * 10)
    file = disk.open()
    assert file.is_foreign
    file.write(0, A, block("x"))
    assert read(file, 0, A) == bytes(block("x"))
    file.close()


def test_a_file_keeps_its_limit_also_if_that_is_lower_than_before(disk: Disk) -> None:
    file = disk.open(max_bytes=PAGE + 4 * 2 * PAGE)
    assert file.num_slots == 4
    for slot in range(4):
        file.write(slot, bytes([slot + 1]) * 16, block("x"))
    file.close()
    smaller = disk.open(max_bytes=PAGE + 2 * 2 * PAGE)
    assert len(smaller.found()) == smaller.num_slots == 2
    assert disk.path.stat().st_size <= PAGE + 2 * 2 * PAGE
    smaller.close()


def test_an_erased_block_can_neither_be_found_nor_read(disk: Disk) -> None:
    file = disk.open()
    file.write(0, A, block("x"))
    file.erase(0)
    assert file.found() == []
    with pytest.raises(ForgedBlock):
        read(file, 0, A)
    file.close()


def test_each_worker_of_a_folder_has_a_file_of_its_own_and_finds_it_again(disk: Disk) -> None:
    other = replace(SCOPE, layout_fingerprint="another model")
    first, second = disk.open(), disk.open(other)
    first.write(0, A, block("x"))
    second.write(0, B, block("y"))
    first.close()
    second.close()
    second, first = disk.open(other), disk.open()
    assert not first.is_foreign
    assert not second.is_foreign
    assert read(first, 0, A) == bytes(block("x"))
    assert read(second, 0, B) == bytes(block("y"))
    first.close()
    second.close()
    assert sorted(os.listdir(disk.folder)) == ["worker-0", "worker-1"]


def test_a_link_in_place_of_a_folder_is_left_alone(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    disk.folder.mkdir()
    (disk.folder / "worker-0").symlink_to(elsewhere)
    disk.open().close()
    assert "left alone" in caplog.text
    assert list(elsewhere.iterdir()) == []
    assert elsewhere.stat().st_mode & 0o777 == 0o755
    assert (disk.folder / "worker-1" / FILE_NAME).is_file()


def test_a_link_in_place_of_a_file_stops_the_start(disk: Disk, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    (disk.folder / "worker-0").mkdir(parents=True)
    disk.path.symlink_to(precious)
    with pytest.raises(ConfigError, match="disk_tier_dir"):
        disk.open()
    assert precious.read_text() == "keep me"


def test_folders_of_another_user_are_left_alone(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (disk.folder / "worker-0").mkdir(parents=True)
    own = os.geteuid()
    answers = iter([own + 1, own])
    monkeypatch.setattr(os, "geteuid", lambda: next(answers))
    disk.open().close()
    assert (disk.folder / "worker-1" / FILE_NAME).is_file()
    assert not disk.path.exists()


def test_a_disk_that_is_full_at_the_start_stops_it(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(ConfigError, match=r"disk_tier_dir: .* No space left"):
        disk.open()
    monkeypatch.undo()
    disk.open().close()
    assert not (disk.folder / "worker-1").exists(), "the lock has ended"


def test_a_folder_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk_tier_dir"):
        claim_file(tmp_path / "file" / "folder", SCOPE)
