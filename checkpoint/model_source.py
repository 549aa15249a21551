"""Finds a checkpoint: a local folder, a GGUF file, or a repository of the Hugging Face hub.

A GGUF file becomes a folder of the same form (see `checkpoint.gguf.folder`). Every process of a
fleet finds its checkpoint with this module; only routers and workers read it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpoint.gguf.folder import SUFFIX, gguf_folder, gguf_in, model_stem
from checkpoint.regular_file import is_there
from protocol.addresses import with_addresses_shown
from protocol.error_line import one_line
from protocol.errors import ConfigError, ModelLoadError

log = logging.getLogger(__name__)

HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""The files to fetch from a hub repository: configuration, weights, tokenizer, chat template."""

TEXT_PATTERNS = tuple(each for each in HUB_PATTERNS if each != "*.safetensors")
"""The files without weights: all that a router reads."""

IGNORED_PATTERNS = ("*/*.safetensors", "consolidated*.safetensors")
"""Weights that are not fetched: the same ones in their authors' own form, as gpt-oss and Mistral's
checkpoints have them."""

BUNDLED = "demo_model"
"""The model that comes with Baton. A folder of this name in the current folder counts first."""

BUNDLED_FOLDER = Path(__file__).resolve().parents[1] / BUNDLED

_OF_THE_CACHE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?::([A-Za-z0-9][\w.-]*))?")
"""A repository, and a quantization where it holds GGUF files."""


def resolve_model(
    model: str | Path,
    revision: str | None = None,
    download: Callable[..., str] | None = None,
    patterns: Sequence[str] = HUB_PATTERNS,
) -> Path:
    """The folder of `model`: a local folder, a GGUF file, a hub id such as `Qwen/Qwen3-0.6B`, or
    `BUNDLED`.

    A folder may hold one model in GGUF instead of a checkpoint. For a hub id, the files that match
    `patterns` are fetched at `revision` (a commit, tag or branch; None: the main branch). For a hub
    id with a quantization, such as `Qwen/Qwen3-0.6B-GGUF:Q8_0`, the GGUF files of that name are
    fetched. `download` (by default huggingface_hub's `snapshot_download`) uses its cache if it can.
    The commit is logged. Raises ModelLoadError, one line, if neither works, and ConfigError for the
    revision of what is local.
    """
    path = _path_of(model)
    if _is_local(path):
        if revision is not None:
            raise ConfigError(
                f"revision {revision!r} has no meaning for the local "
                f"{'folder' if path.is_dir() else 'file'} {path}; leave it out, "
                "or name the model by its hub id (owner/name)"
            )
        return _local(path)
    match = _HUB_ID.fullmatch(str(model))
    if match is None:
        shown = with_addresses_shown(str(model))
        raise ModelLoadError(
            f"there is no folder or file {shown}, and it is not a hub id "
            "(owner/name, or owner/name:QUANTIZATION for GGUF files)"
        )
    name, quantization = match.groups()
    if quantization is not None:
        patterns = [f"*{each}*{SUFFIX}" for each in _spellings(quantization)]
    found = _fetched(name, revision, download, patterns)
    if quantization is None:
        return found
    file = gguf_in(found, quantization)
    if file is None:
        raise ModelLoadError(f"{name} holds no GGUF file whose name ends in {quantization}")
    return gguf_folder(file)


def _path_of(model: str | Path) -> Path:
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # an unknown user, or one without a home folder
        raise ModelLoadError(f"{model}: there is no home folder of this name here") from error
    is_bundled = str(model) == BUNDLED and not path.exists() and BUNDLED_FOLDER.is_dir()
    return BUNDLED_FOLDER if is_bundled else path


def _is_local(path: Path) -> bool:
    """Whether there is such a file or folder. Raises ModelLoadError if this cannot be known, unless
    the path may be a hub id."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if _HUB_ID.fullmatch(str(path)):
            return False
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    return True


def _local(path: Path) -> Path:
    if not path.is_dir():
        if path.suffix.lower() == SUFFIX:
            return gguf_folder(path)
        raise ModelLoadError(
            f"{path} is a file; name the folder that holds config.json, or a file that ends in "
            f"{SUFFIX}"
        )
    file = None if is_there(path / "config.json") else gguf_in(path)
    if file is not None:
        return gguf_folder(file)
    commit = commit_of(path)
    if commit is not None:
        log.info("the checkpoint in %s is commit %s of its hub repository", path, commit)
    return path


def _spellings(quantization: str) -> list[str]:
    """Patterns of the hub tell upper and lower case apart."""
    return sorted({quantization, quantization.upper(), quantization.lower()})


def _fetched(
    name: str,
    revision: str | None,
    download: Callable[..., str] | None,
    patterns: Sequence[str],
) -> Path:
    """The folder of a hub repository's files in the hub's cache. Raises ModelLoadError."""
    if download is None:
        from huggingface_hub import snapshot_download  # slow to import, rarely needed

        download = snapshot_download
    try:
        found = download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(IGNORED_PATTERNS),
        )
    except Exception as error:  # also its transports' errors, which have no class in common
        reason = one_line(with_addresses_shown(str(error))) or type(error).__name__
        at = f" at revision {revision!r}" if revision else ""
        raise ModelLoadError(
            f"{name!r} is neither a local folder nor could it be fetched from the "
            f"Hugging Face hub{at} ({_what_to_check(error)}): {reason}"
        ) from error
    log.info("%s at revision %s is commit %s", name, revision or "main", commit_of(found))
    return Path(found)


def _what_to_check(error: Exception) -> str:
    """A question about the likeliest cause. The hub also refuses what does not exist, and hides
    what is private."""
    if isinstance(error, OSError) and error.errno in _OF_THE_CACHE:
        return "is there room in its cache, and may this user write there? HF_HOME names its folder"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return "does it exist, and may the account of HF_TOKEN read it?"
    return "is there a network?"


def commit_of(folder: str | Path) -> str | None:
    """The commit that a folder of the hub's cache holds; None for any other folder."""
    path = Path(folder).resolve()
    is_snapshot = path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name) is not None
    return path.name if is_snapshot else None


def model_name(model: str) -> str:
    """The name under which a checkpoint is served by default: its folder's or file's, or the hub
    id."""
    path = _path_of(model)
    if os.path.isfile(path):
        return model_stem(path)
    return path.resolve().name if os.path.isdir(path) else model
