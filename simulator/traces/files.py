"""Reads a trace by its name: a file, whose format is told by its first line, or made-up traffic."""

from __future__ import annotations

import random
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from process.settings.home_paths import home_path
from protocol.errors import ConfigError
from router.recording.recorder import FORMAT
from simulator.traces import agents, azure, bailian, generated, mooncake, recorded
from simulator.traces.lines import json_lines, open_trace
from simulator.traces.sessions import Session, Trace

_GIT_LFS = b"version https://git-lfs."


@dataclass(frozen=True)
class TraceOptions:
    """Which part of a trace is used, and how fast it comes. `speed` 2 halves the time between
    arrivals; sessions of agents begin within `span_s`, and only the first `limit` requests (or
    sessions, where a trace has them) are used. Made-up prompts repeat by blocks of `block_tokens`
    tokens."""

    seed: int = 0
    speed: float = 1.0
    limit: int | None = None
    span_s: float = 1800.0
    block_tokens: int = generated.BLOCK_TOKENS


def read_trace(name: str, options: TraceOptions) -> Trace:
    """The trace. Raises ConfigError if it cannot be read or is empty."""
    rng = random.Random(options.seed)
    try:
        found = list(_sessions(name, options, rng))
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise ConfigError(f"--trace {name}: {getattr(error, 'strerror', None) or error}") from error
    if not found:
        raise ConfigError(f"--trace {name}: the file has no requests")
    found = found[: options.limit]
    title = name if generated.is_generated(name) else Path(name).stem
    return Trace(title, found).faster(options.speed)


def _sessions(name: str, options: TraceOptions, rng: random.Random) -> Iterator[Session]:
    if generated.is_generated(name):
        return generated.sessions(name, rng, options.block_tokens)
    path = home_path(name, "--trace")
    if path.is_dir():
        raise ConfigError(f"--trace {name}: it is a folder")
    if path.exists() and not path.is_file():
        raise ConfigError(f"--trace {name}: not a regular file; write the trace to a file first")
    head = _first_line(path)
    if azure.is_header(head.decode("utf-8", "replace")):
        return azure.sessions(path, rng)
    if not head:
        return iter(())
    lines = json_lines(path)
    first = next(lines, None) if head.removeprefix(BOM_UTF8).lstrip()[:1] == b"{" else None
    if first is not None and "requests" in first:
        return agents.sessions(chain([first], lines), options.span_s, rng)
    if first is not None and mooncake.IDS in first and bailian.PARENT in first:
        return bailian.sessions(chain([first], lines))
    if first is not None and (mooncake.IDS in first or mooncake.LENGTH in first):
        return mooncake.sessions(chain([first], lines), rng, mooncake.IDS in first)
    if first is not None and FORMAT in first:
        return recorded.sessions(chain([first], lines))
    if head.startswith(_GIT_LFS):
        raise ConfigError(
            f"--trace {name}: a pointer of Git LFS; fetch the file that it stands for"
        )
    raise ConfigError(
        f"--trace {name}: unknown format; it must be CSV with the columns "
        f"{','.join(azure.COLUMNS)} or {','.join(azure.BURST_COLUMNS)}, or JSON lines with "
        f"{mooncake.LENGTH!r} (Mooncake, Bailian), 'requests' (sessions of agents) or "
        f"{FORMAT!r} first (recorded by a router)"
    )


def _first_line(path: Path) -> bytes:
    """The beginning of the first line that is not empty."""
    with open_trace(path) as file:
        while line := file.readline(1 << 16):
            if line.strip():
                return line
    return b""
