"""Shared memory's files: private, reserved, and swept once their creator is gone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kv_transfer.transports.shm_segments import SegmentFolder, map_pool
from protocol.errors import ConfigError, TransferError
from tests.forked import fork_context


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "segments"


def die_with_a_segment(folder: Path) -> None:
    """A creator that is killed, as the kernel does it."""
    SegmentFolder(folder, "dead").create_pool(4096)
    os.kill(os.getpid(), 9)


def test_a_pool_is_shared_zeroed_and_removed(folder: Path) -> None:
    segment = SegmentFolder(folder, "one")
    ours = segment.create_pool(8192)
    theirs = map_pool(segment.pool_path, 8192)
    assert ours[:] == bytes(8192)
    ours[8191] = 7
    assert theirs[8191] == 7
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    segment.close()
    segment.close()
    theirs[0] = 9
    assert ours[0] == 9  # mappings outlive the name
    assert not folder.exists()
    ours.close()
    theirs.close()


def test_the_folder_stays_while_others_live_in_it(folder: Path) -> None:
    one, other = SegmentFolder(folder, "one"), SegmentFolder(folder, "other")
    one.close()
    assert [path.name for path in folder.iterdir()] == ["other.lock"]
    other.close()
    assert not folder.exists()


def test_what_a_killed_creator_left_is_swept_and_the_living_is_not(folder: Path) -> None:
    living = SegmentFolder(folder, "living")
    memory = living.create_pool(4096)
    creator = fork_context().Process(target=die_with_a_segment, args=(folder,))
    creator.start()
    creator.join()
    assert creator.exitcode == -9
    creator.close()
    assert (folder / "dead.pool").exists()

    later = SegmentFolder(folder, "later")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["later.lock", "living.lock", "living.pool"]
    later.close()
    living.close()
    memory.close()


def test_a_name_is_claimed_once(folder: Path) -> None:
    segment = SegmentFolder(folder, "one")
    with pytest.raises(FileExistsError):
        SegmentFolder(folder, "one")
    segment.close()


def test_too_much_memory_is_refused_with_advice(folder: Path) -> None:
    segment = SegmentFolder(folder, "huge")
    with pytest.raises(ConfigError, match="--shm-size"):
        segment.create_pool(1 << 60)
    assert not segment.pool_path.exists()
    segment.close()


def test_a_folder_that_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="taken"):
        SegmentFolder(tmp_path / "taken", "one")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="remove it"):
        SegmentFolder(tmp_path / "link", "one")


def test_peers_pools_that_cannot_be_mapped(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="one host"):
        map_pool(tmp_path / "missing.pool", 1)
    small = tmp_path / "small.pool"
    small.write_bytes(bytes(10))
    with pytest.raises(TransferError, match="10 bytes, expected 11"):
        map_pool(small, 11)
    (tmp_path / "link.pool").symlink_to(small)
    with pytest.raises(TransferError, match="cannot be opened"):
        map_pool(tmp_path / "link.pool", 10)
