"""Key files that change while the router runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from gateway.admission.api_keys import hash_key, make_key
from gateway.admission.key_files import MANY_WITHOUT_ID, KeyFiles
from protocol.errors import ConfigError

FIRST, SECOND, PLAIN = make_key(), make_key(), make_key()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "keys"
    found.write_text(f"{hash_key(FIRST)} name=first\n{hash_key(SECOND)} name=second\n")
    return found


def test_a_ring_is_of_plain_keys_and_of_a_file(path: Path) -> None:
    ring = KeyFiles(CollectorRegistry()).ring([PLAIN], str(path))
    assert ring.names == ["key 1", "first", "second"]
    found = ring.find(SECOND)
    assert found is not None
    assert found.terms.name == "second"
    assert ring.find(make_key()) is None


def test_a_revoked_key_opens_nothing_and_plain_keys_stay(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = KeyFiles(CollectorRegistry())
    ring = files.ring([PLAIN], str(path))
    assert ring.admits(FIRST)
    path.write_text(f"{hash_key(SECOND)} name=renamed\n")
    with caplog.at_level(logging.INFO):
        files.read_changes()
    assert (ring.admits(FIRST), ring.admits(SECOND), ring.admits(PLAIN)) == (False, True, True)
    assert caplog.records[-1].getMessage().endswith("1 keys; new: renamed; gone: first, second")


def test_a_file_that_did_not_change_is_not_read(path: Path, caplog) -> None:
    files = KeyFiles(CollectorRegistry())
    files.ring([], str(path))
    with caplog.at_level(logging.INFO):
        files.read_changes()
        assert not caplog.records
        files.read_changes(at_all=True)
    assert len(caplog.records) == 1


def test_many_keys_that_are_searched_are_told(path: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        for count, num_told in ((MANY_WITHOUT_ID, 0), (MANY_WITHOUT_ID + 1, 1)):
            path.write_text(f"{hash_key('an-own-key-that-is-long')}\n" * count)
            KeyFiles(CollectorRegistry()).ring([], str(path))
            assert len(caplog.records) == num_told
    assert f"baton keys --check {path}" in caplog.text


@pytest.mark.parametrize(
    "content",
    ["", "# none left\n", hash_key(FIRST)[:-3]],
    ids=["empty", "only a comment", "cut short"],
)
def test_a_file_that_cannot_be_used_changes_nothing(
    path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty ring would open the API to everybody."""
    registry = CollectorRegistry()
    files = KeyFiles(registry)
    ring = files.ring([], str(path))
    path.write_text(content)
    files.read_changes()
    files.read_changes()
    assert ring.admits(FIRST)
    assert [each.levelno for each in caplog.records] == [logging.ERROR], "it is told once"
    assert registry.get_sample_value("baton_http_key_files_refused_total") == 1
    path.unlink()
    files.read_changes()
    assert ring.admits(FIRST)


def test_at_the_start_a_wrong_file_is_an_error(path: Path) -> None:
    path.write_text("")
    with pytest.raises(ConfigError, match="holds no key"):
        KeyFiles(CollectorRegistry()).ring([PLAIN], str(path))


async def test_a_hangup_reads_the_files_at_once(path: Path) -> None:
    files = KeyFiles(CollectorRegistry())
    ring = files.ring([], str(path))
    asked = asyncio.Event()
    task = asyncio.create_task(files.run(asked, interval_s=3600.0))
    path.write_text(f"{hash_key(SECOND)}\n")
    asked.set()
    async with asyncio.timeout(60):
        while ring.admits(FIRST):
            await asyncio.sleep(0)
    assert ring.admits(SECOND)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("turns", range(4))
async def test_a_hangup_at_the_same_time_holds_up_no_stop(path: Path, turns: int) -> None:
    files = KeyFiles(CollectorRegistry())
    files.ring([], str(path))
    asked = asyncio.Event()
    task = asyncio.create_task(files.run(asked, interval_s=3600.0))
    for _ in range(3):
        await asyncio.sleep(0)
    asked.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=60)
    assert done == {task}
