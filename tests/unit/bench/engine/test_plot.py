"""Pictures of the engine benchmark's figures, with matplotlib and without."""

from __future__ import annotations

import sys

import pytest

from bench.engine.plot import plot_side_by_side, plot_sweep
from protocol.errors import BatonError

FIGURES = {
    "prefill 512": {"ours": [100.0, 110.0], "theirs": [50.0, 60.0]},
    "decode 1": {"ours": [10.0, 10.0], "theirs": [9.0, 12.0]},
}


def test_pictures_are_written(tmp_path):
    plot_side_by_side("M", FIGURES, tmp_path / "a.png")
    plot_sweep("M", FIGURES, 8, [10**9, 2 * 10**9], 5e10, tmp_path / "b.png")
    for name in ("a.png", "b.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BatonError, match="pip install matplotlib"):
        plot_side_by_side("M", FIGURES, tmp_path / "a.png")
