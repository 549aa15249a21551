"""`baton keys` makes what the router takes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from cli.main import main as baton
from gateway.admission.api_keys import KeyRing, hash_key, make_key
from http_kit.tenant import KeyTerms


def main(argv: list[str]) -> int:
    return baton(["keys", *argv])


def test_a_new_key_comes_with_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    key, hashed = (line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines())
    assert KeyRing([hashed]).admits(key)


def test_an_own_key_is_hashed_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("an-own-key-that-is-long\n"))
    assert main(["--hash"]) == 0
    printed = capsys.readouterr()
    hashed = printed.out.strip()
    assert "carries no id" in printed.err
    assert KeyRing([hashed]).admits("an-own-key-that-is-long")


def test_a_weak_key_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("weak\n"))
    assert main(["--hash"]) == 2
    assert "at least 20" in capsys.readouterr().err


def test_flags_say_what_the_key_allows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--name=batch", "--max-priority=3", "--inflight=8", "--cache=team"]) == 0
    key, line = (line.partition(":")[2].strip() for line in capsys.readouterr().out.splitlines())
    found = KeyRing([line]).find(key)
    assert found is not None
    assert found.terms == KeyTerms("batch", 3, 3, 8, "team")


def test_flags_that_contradict_each_other_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--priority=-1"])
    assert caught.value.code == 2
    assert "more urgent than max_priority" in capsys.readouterr().err


def test_a_key_file_is_searched_for_keys_to_renew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, own = tmp_path / "keys", hash_key("an-own-key-that-is-long")
    path.write_text(f"# ours\n{hash_key(make_key())} name=new\n{own} name=batch\n{own}\n")
    assert main([f"--check={path}"]) == 1
    batch, nameless, total = capsys.readouterr().out.splitlines()
    assert batch.startswith("line 3, batch: carries no id")
    assert nameless.startswith("line 4: carries no id")
    assert total == "2 of 3 keys to renew"
    path.write_text(f"{hash_key(make_key())}\n")
    assert main([f"--check={path}"]) == 0
    assert main([f"--check={tmp_path}/none"]) == 2
    assert "cannot be read" in capsys.readouterr().err
