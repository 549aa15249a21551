"""Paths as people write them: a leading `~` is a home folder.

A user without an entry in the system's list, as in many containers, has none unless HOME names it.
"""

from __future__ import annotations

from pathlib import Path

from protocol.errors import ConfigError


def home_path(name: str | Path, of: str = "") -> Path:
    """The path, with the home folder in place of a leading `~`. Raises ConfigError, which begins
    with the name `of` the setting, if there is one."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{of} {name}: there is no home folder of this name here".lstrip()
        ) from error
