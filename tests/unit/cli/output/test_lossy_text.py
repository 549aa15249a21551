"""What `baton up` prints may be lost; the fleet must not be."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from cli.up import console_on


class Disk(io.StringIO):
    """A stream on a disk that may be full."""

    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_full_disk_below_standard_output_ends_no_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    monkeypatch.setattr(sys, "stdout", disk)
    console = console_on(None)
    console.print("before")
    disk.is_full = True
    console.print("lost")
    disk.is_full = False
    console.print("after")
    assert disk.getvalue() == "before\nafter\n"
    assert not console.is_terminal


def test_a_closed_reader_is_no_failure_either(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    monkeypatch.setattr(sys, "stdout", disk)
    console = console_on(None)
    disk.close()
    console.file.flush()
