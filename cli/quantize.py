"""`baton quantize`: writes a checkpoint with weights in 4 and 5 bits, rounded for a text's inputs.

The folder that it writes is a model like any other: workers get it as `--model`.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from checkpoint.regular_file import is_there
from process.settings import setting, setting_of, settings_or_exit
from protocol.errors import ConfigError
from worker.settings import WorkerSettings

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_SIGNALLED = 128
"""A process that a signal ends has this plus the signal's number as its exit code."""
_LEAST_TOKENS = 512
_MOST_CHARS = 128
"""Characters of the text that are read for each token; ten times what texts have."""


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """Settings of `baton quantize`."""

    model: str = setting(help="folder or hub id of the model, with weights that are not quantized")
    revision: str | None = setting_of(WorkerSettings, "revision")
    text: str = setting(
        help="file of text like that which the model will read: UTF-8, with chat templates applied "
        "if it will serve chats"
    )
    output: str = setting(help="folder to write, which must not exist yet")
    tokens: int = setting(
        16384,
        help="how much of the text the model reads; more takes as much longer, and lets weights "
        "fit the text better",
        unit="tokens",
        minimum=_LEAST_TOKENS,
    )


def main(argv: Sequence[str]) -> int:
    """Write the folder; returns 0. Raises ConfigError, and ModelLoadError for the model."""
    settings = settings_or_exit(
        QuantizeSettings,
        argv,
        prog="baton quantize",
        description="Round a model's weights to 4 and 5 bits, so that the products of a text's "
        "inputs change as little as possible.",
    )
    target = Path(settings.output)
    if is_there(target):
        raise ConfigError(f"output {target} is there already; name a folder to be made")
    text = _read(Path(settings.text), settings.tokens * _MOST_CHARS)
    with _ended_in_order():
        _write_beside(target, settings, text)
    print(f"{settings.model} is quantized in {target}")
    return 0


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP raise SystemExit, once."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in _ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(_SIGNALLED + number)

    former = {each: signal.getsignal(each) for each in _ENDING}
    try:
        for each in _ENDING:
            if former[each] is not signal.SIG_IGN:  # as nohup sets it
                signal.signal(each, end)
        yield
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def _write_beside(target: Path, settings: QuantizeSettings, text: str) -> None:
    made = _beside(target)
    try:
        _write(settings, text, made)
        made.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _read(file: Path, most_chars: int) -> str:
    try:
        with file.open(encoding="utf-8") as stream:
            return stream.read(most_chars)
    except OSError as error:
        raise ConfigError(f"cannot read text {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"text {file} is not in UTF-8: {error}") from error


def _beside(target: Path) -> Path:
    """An empty folder, on the same disk."""
    try:
        made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        made.chmod(0o755)  # workers of other users read it
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error
    return made


def _write(settings: QuantizeSettings, text: str, made: Path) -> None:
    # slow to import
    from checkpoint.model_source import resolve_model
    from engine.native.library import KernelsUnavailable, load_library
    from engine.rounding.quantized_checkpoint import WINDOW, plain_config, write_quantized
    from gateway.text.tokenizer import Tokenizer

    folder = resolve_model(settings.model, settings.revision)
    plain_config(folder)  # fails before the text is read
    try:
        kernels = load_library()
    except KernelsUnavailable as error:
        raise ConfigError(f"quantize needs our own kernels: {error}") from error
    if not kernels.baton_has_linear():
        raise ConfigError("quantize needs a CPU with AVX2 or more")
    tokenizer = Tokenizer(folder, threads=1)
    try:
        lead = tokenizer.encode("", add_special_tokens=True)  # what a prompt begins with
        tokens = tokenizer.encode(text, add_special_tokens=False)[: settings.tokens]
    finally:
        tokenizer.close()
    if len(tokens) < _LEAST_TOKENS:
        raise ConfigError(
            f"text {settings.text} has {len(tokens)} tokens; give at least {_LEAST_TOKENS}"
        )
    size = WINDOW - len(lead)
    windows = [lead + tokens[i : i + size] for i in range(0, len(tokens), size)]
    write_quantized(folder, windows, made, kernels, _report)


def _report(layer: int, layers: int) -> None:
    print(f"layer {layer} of {layers}", file=sys.stderr, flush=True)
