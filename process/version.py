"""Which version of Baton this is."""

from __future__ import annotations

import importlib.metadata

_DISTRIBUTION = "baton-serve"


def baton_version() -> str:
    """The installed version; "unknown" when running from a folder that was not installed."""
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
