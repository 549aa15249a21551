"""A process loads no kernels that somebody else could have put there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.native.compiler import KernelsUnavailable
from engine.native.kernel_cache import _other_folder, cache_folder, why_not
from engine.native.library import load_library


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache below a folder of this user alone."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    _other_folder.cache_clear()
    yield tmp_path
    _other_folder.cache_clear()


def test_a_cache_of_this_user_alone_is_used_also_before_it_exists(home: Path) -> None:
    folder = home / "cache/baton/kernels"
    assert cache_folder() == folder
    folder.mkdir(parents=True, mode=0o700)
    assert cache_folder() == folder


@pytest.mark.parametrize("mode", [0o707, 0o777])
@pytest.mark.parametrize("where", ["cache", "cache/baton", "cache/baton/kernels"])
def test_a_folder_that_others_may_write_to_is_not_used(home: Path, where: str, mode: int) -> None:
    (home / "cache/baton/kernels").mkdir(parents=True)
    (home / where).chmod(mode)
    chosen = cache_folder()
    assert chosen == home / f"tmp/baton-kernels-{os.geteuid()}"
    assert chosen.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == chosen, "also for other processes of this user"


def test_a_squatted_name_is_not_used(home: Path) -> None:
    (home / "cache").mkdir()
    (home / "cache").chmod(0o777)
    squatted = home / f"tmp/baton-kernels-{os.geteuid()}"
    squatted.mkdir()
    squatted.chmod(0o777)
    chosen = cache_folder()
    assert chosen != squatted
    assert chosen.parent == home / "tmp"
    assert chosen.stat().st_mode & 0o777 == 0o700


def test_nothing_is_built_where_others_may_rename_every_folder(home: Path) -> None:
    """As in a pod: an emptyDir may be written by everyone and has no sticky bit."""
    for name in ("cache", "tmp"):
        (home / name).mkdir(exist_ok=True)
        (home / name).chmod(0o777)
    with pytest.raises(PermissionError, match="baton build-kernels"):
        cache_folder()
    with pytest.raises(KernelsUnavailable, match=f"others may write to {home / 'tmp'}"):
        load_library.__wrapped__()  # which may have loaded them before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_group_of_others_may_not_write_and_the_user_s_own_may(home: Path) -> None:
    (home / "cache/baton/kernels").mkdir(parents=True)
    (home / "cache").chmod(0o770)
    assert cache_folder() == home / "cache/baton/kernels", "as with a umask of 002"
    os.chown(home / "cache", 0, 12345)
    assert cache_folder().parent == home / "tmp"


def test_others_cannot_replace_what_lies_in_a_sticky_folder(home: Path) -> None:
    (home / "cache/baton").mkdir(parents=True)
    (home / "cache").chmod(0o1777)
    assert cache_folder() == home / "cache/baton/kernels"


def test_a_library_that_others_may_write_to_is_named(home: Path) -> None:
    library = home / "kernels.so"
    library.write_bytes(b"")
    library.chmod(0o666)
    assert why_not(library) == f"others may write to {library}"
    library.chmod(0o600)
    assert why_not(library) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user_is_not_used(home: Path) -> None:
    (home / "cache/baton/kernels").mkdir(parents=True)
    os.chown(home / "cache/baton", 12345, 12345)
    assert cache_folder().parent == home / "tmp"
    taken = home / "cache/baton"
    assert why_not(taken / "kernels") == f"{taken} belongs to another user"


def test_a_link_is_followed_to_where_it_leads(home: Path) -> None:
    (home / "open").mkdir()
    (home / "open").chmod(0o777)
    (home / "cache").symlink_to(home / "open")
    assert cache_folder().parent == home / "tmp"
