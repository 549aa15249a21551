"""The numbers of workers in a settings file: in [up], never where they would be a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.up_settings import UpSettings
from process.settings import load_settings
from protocol.errors import ConfigError


def load(path: Path) -> UpSettings:
    return load_settings(
        UpSettings,
        ["--model=m", f"--config={path}"],
        prog="baton up",
        description="",
        section="up",
        environ={},
    )


def test_worker_counts_belong_into_the_up_table(tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    path.write_text("[up]\nprefill = 2\ndecode = 3\n[prefill]\nmax_batch_size = 8\n")
    settings = load(path)
    assert (settings.prefill, settings.decode) == (2, 3)


@pytest.mark.parametrize("key", ["prefill", "decode"])
def test_worker_count_outside_the_up_table_is_refused_at_once(tmp_path: Path, key: str) -> None:
    path = tmp_path / "baton.toml"
    path.write_text(f"{key} = 2\n")
    with pytest.raises(ConfigError, match=rf"key {key}: must be a table.*\[up\]"):
        load(path)
