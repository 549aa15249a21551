"""Identifies a checkpoint by the small files that routers and workers must agree on."""

from __future__ import annotations

import hashlib
from pathlib import Path

from checkpoint.regular_file import is_there, read_small
from checkpoint.vocabularies.tokenizer_json import MAX_TOKENIZER_BYTES, tokenizer_file


def texts_fingerprint(folder: Path) -> str:
    """A digest of the model's configuration and tokenizer, 32 hex digits; "" without a tokenizer.
    Raises ModelLoadError if a file cannot be read."""
    file = tokenizer_file(folder)
    if not is_there(file):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for path in (folder / "config.json", file):
        content = read_small(path, MAX_TOKENIZER_BYTES)
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
