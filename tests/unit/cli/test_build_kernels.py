"""`baton build-kernels`: what it builds, and one line for what it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.main import main
from engine.native import library


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text("int one() { return 1; }\n")
    monkeypatch.setattr(library, "SOURCES", folder)


@pytest.mark.usefixtures("small_sources")
def test_it_builds_the_named_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "image" / "kernels"
    assert main(["build-kernels", "--instruction-sets", "generic", str(folder)]) == 0
    assert "generic: built in" in capsys.readouterr().out
    assert len(list(folder.iterdir())) == 2, "with and without a copy of OpenMP"
    assert folder.stat().st_mode & 0o055 == 0o055, "others may read it"
    before = sorted(folder.iterdir())
    assert main(["build-kernels", str(folder), "--instruction-sets=generic"]) == 0
    assert sorted(folder.iterdir()) == before


@pytest.mark.usefixtures("small_sources")
def test_what_cannot_be_built_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["build-kernels"]) == 2
    assert "name one folder" in capsys.readouterr().err
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert main(["build-kernels", str(tmp_path), "--instruction-sets=avx2"]) == 1
    assert "baton build-kernels: avx2: there is no C++ compiler" in capsys.readouterr().err
    assert main(["build-kernels", str(tmp_path)]) == 1
    assert "no kernels were built" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["build-kernels", str(tmp_path), "--instruction-sets=sse"])
