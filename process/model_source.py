"""Finds a checkpoint: a local folder, or a repository of the Hugging Face hub.

Every process of a fleet finds its checkpoint with this module; only routers and workers read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from protocol.errors import ModelLoadError

HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")
"""The files to fetch from a hub repository: configuration, weights, tokenizer, chat template."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(model: str | Path, download: Callable[..., str] | None = None) -> Path:
    """The folder of `model`: a local folder, or a hub id such as `Qwen/Qwen3-0.6B`.

    A hub id is fetched with `download` (huggingface_hub's `snapshot_download` by default), which
    uses its cache if it can. Raises ModelLoadError, one line, if neither works.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelLoadError(f"{path} is a file; name the folder that holds config.json")
    if not _HUB_ID.fullmatch(str(model)):
        raise ModelLoadError(f"there is no folder {path}, and it is not a hub id (owner/name)")
    if download is None:
        from huggingface_hub import snapshot_download  # slow to import, rarely needed

        download = snapshot_download
    try:
        return Path(download(str(model), allow_patterns=list(HUB_PATTERNS)))
    except (OSError, ValueError) as error:  # the hub's own errors derive from these
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(
            f"{str(model)!r} is neither a local folder nor could it be fetched from the "
            f"Hugging Face hub (is there a network?): {reason}"
        ) from error


def model_name(model: str) -> str:
    """The name under which a checkpoint is served by default: its folder's, or the hub id."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model
