"""The version of Baton."""

from __future__ import annotations

import importlib.metadata

_DISTRIBUTION = "baton-serve"


def baton_version() -> str:
    """The installed version; "unknown" if Baton runs from a folder without being installed."""
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
