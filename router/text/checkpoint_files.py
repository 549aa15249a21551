"""Reading the small JSON files of a checkpoint folder, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol.errors import ModelLoadError


def read_json(path: Path, required: bool) -> dict[str, Any]:
    """The object in a JSON file; empty if an optional file is missing.

    Raises ModelLoadError if a required file is missing or a file does not hold an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if required:
            raise ModelLoadError(f"{path} is missing") from error
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return content
