"""Identifies a checkpoint by the small files that routers and workers must agree on."""

from __future__ import annotations

import hashlib
from pathlib import Path

from checkpoint.regular_file import is_there, read_small

_FILES = (("config.json", 16 * 1024 * 1024), ("tokenizer.json", 256 * 1024 * 1024))


def texts_fingerprint(folder: Path) -> str:
    """A digest of the model's configuration and tokenizer, 32 hex digits; "" without a tokenizer.
    Raises ModelLoadError if a file cannot be read."""
    if not is_there(folder / "tokenizer.json"):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for name, most_bytes in _FILES:
        content = read_small(folder / name, most_bytes)
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
