"""`baton keys` makes what the router takes."""

from __future__ import annotations

import io

import pytest

from cli.keys import main
from router.http.api_keys import KeyRing


def test_a_new_key_comes_with_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    key, hashed = (line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines())
    assert KeyRing([hashed]).admits(key)


def test_an_own_key_is_hashed_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("an-own-key-that-is-long\n"))
    assert main(["--hash"]) == 0
    hashed = capsys.readouterr().out.strip()
    assert KeyRing([hashed]).admits("an-own-key-that-is-long")


def test_a_weak_key_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("weak\n"))
    assert main(["--hash"]) == 2
    assert "at least 20" in capsys.readouterr().err
