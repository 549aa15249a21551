"""The folder of a GGUF checkpoint: its metadata as Hugging Face's small files, beside links to it.

Everything else in Baton reads such a folder. It lies in this user's cache under a digest of the
GGUF files' places, sizes and times, and is made again where one of these changes. Owns those
folders; several processes may make the same one at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from checkpoint.gguf.configuration import end_ids, model_config
from checkpoint.gguf.header import GgufHeader, read_header
from checkpoint.gguf.vocabulary import tokenizer_files
from checkpoint.json_keys import JsonKeys
from checkpoint.regular_file import open_regular
from protocol.errors import ModelLoadError

SUFFIX = ".gguf"
LINK_NAME = "model-{:05}-of-{:05}" + SUFFIX
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_PROJECTOR = "mmproj"  # files whose names begin with it encode images and hold no language model
_MAX_SPLITS = 1000


def gguf_folder(file: Path, cache: Path | None = None) -> Path:
    """The checkpoint folder that stands for `file` and the other parts of its model. It is made in
    `cache` (by default this user's) unless it is there.

    Raises ModelLoadError, one line that names a file.
    """
    parts = split_files(file)
    for part in parts:
        open_regular(part).close()
    folder = (cache or _cache()) / _digest(parts)
    if not (folder / "config.json").is_file():
        _make(parts, folder)
    return folder


def gguf_in(folder: Path, quantization: str | None = None) -> Path | None:
    """The first part of the one model in GGUF in `folder` or one level below; None if there is
    none. With `quantization`, only models whose names end in it count. Raises ModelLoadError if
    there are several."""
    found = sorted(_models(folder))
    if quantization is not None:
        found = [path for path in found if _is_of(path, quantization)]
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in found[:8])
        raise ModelLoadError(f"{folder} holds several models, name one of the files: {names}")
    return found[0] if found else None


def model_stem(file: Path) -> str:
    """The file's name without its ending and the number of its part."""
    match = _SPLIT.fullmatch(file.name)
    return match[1] if match else file.stem


def split_files(file: Path) -> list[Path]:
    """All parts of the model that `file` belongs to, the first one first. Raises ModelLoadError."""
    match = _SPLIT.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= _MAX_SPLITS:
        raise ModelLoadError(f"{file} cannot be part {int(match[2])} of {count}")
    parts = [file.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.exists():
            raise ModelLoadError(f"{part} is missing, a part of the model in {file}")
    return parts


def read_parts(parts: Sequence[Path]) -> list[GgufHeader]:
    """The headers of a model's files, which must belong together. Raises ModelLoadError."""
    headers = [read_header(part) for part in parts]
    names: set[str] = set()
    for index, (part, header) in enumerate(zip(parts, headers, strict=True)):
        keys = JsonKeys(header.metadata, str(part))
        count = keys.integer("split.count", 1, minimum=0) or 1
        if count != len(parts):
            raise keys.wrong("split.count", f"{len(parts)}, as its name says")
        if keys.integer("split.no", index, minimum=0) != index:
            raise keys.wrong("split.no", f"{index}, as its name says")
        for tensor in header.tensors:
            if tensor.name in names:
                raise ModelLoadError(f"{part}: the tensor {tensor.name!r} is in another part, too")
            names.add(tensor.name)
    return headers


def small_files(parts: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The contents of the folder's JSON files by name. Raises ModelLoadError."""
    headers = read_parts(parts)
    keys = JsonKeys(headers[0].metadata, str(parts[0]))
    tensors = {tensor.name: tensor for header in headers for tensor in header.tensors}
    return {
        **tokenizer_files(keys),
        "generation_config.json": {"eos_token_id": end_ids(keys)},
        "config.json": model_config(keys, tensors),
    }


def _models(folder: Path) -> Iterator[Path]:
    """First parts of models, in the folder or, as on the hub, one level below."""
    try:
        paths = [*folder.glob("*"), *folder.glob("*/*")]
    except OSError as error:
        raise ModelLoadError(f"cannot read {folder}: {error.strerror}") from error
    for path in paths:
        if path.suffix.lower() != SUFFIX or path.name.startswith(_PROJECTOR):
            continue
        match = _SPLIT.fullmatch(path.name)
        if match is None or int(match[2]) == 1:
            yield path


def _is_of(path: Path, quantization: str) -> bool:
    """Whether the file's name, or its folder's, ends in the quantization's name."""
    pattern = re.compile(rf"(.*[-._])?{re.escape(quantization)}", re.IGNORECASE)
    return any(pattern.fullmatch(name) for name in (model_stem(path), path.parent.name))


def _digest(parts: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(_own_digest())
    for part in parts:
        status = part.stat()
        place = os.path.realpath(part), status.st_size, status.st_mtime_ns, status.st_ino
        digest.update(repr(place).encode())
    return digest.hexdigest()


@functools.cache
def _own_digest() -> bytes:
    """The digest of the source files that make folders: another version of them makes other
    folders."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


def _make(parts: Sequence[Path], folder: Path) -> None:
    contents = small_files(parts)
    try:
        made = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
        try:
            for name, content in contents.items():
                (made / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
            for index, part in enumerate(parts):
                link = made / LINK_NAME.format(index + 1, len(parts))
                link.symlink_to(os.path.realpath(part))
            with contextlib.suppress(OSError):  # another process was faster
                made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise ModelLoadError(f"cannot write {folder}: {error.strerror}") from error
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} could not be made for {parts[0]}")


def _cache() -> Path:
    """This user's folder for such folders. Raises ModelLoadError."""
    with contextlib.suppress(RuntimeError, OSError):  # no home folder, or nothing may be written
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return _own(root / "baton" / "gguf")
    try:
        return _own(Path(tempfile.gettempdir()) / f"baton-gguf-{os.geteuid()}")
    except OSError as error:
        raise ModelLoadError(
            f"there is no folder for what is read from GGUF files ({error}); let XDG_CACHE_HOME "
            "name one that can be written to"
        ) from error


def _own(folder: Path) -> Path:
    """The folder, created if it is missing. Raises OSError if others could change it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        raise PermissionError(f"{folder} is not this user's alone")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written to")
    return folder
