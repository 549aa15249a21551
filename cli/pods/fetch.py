"""`baton fetch`: downloads a model into the hub's cache, before workers need it.

With `--stay` the process then waits for SIGTERM, as the pods of a DaemonSet must.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint.model_source import resolve_model
from process.settings import setting, setting_of, settings_or_exit
from worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class FetchSettings:
    """Settings of `baton fetch`."""

    model: str = setting(help="hub id of the model; a folder is left as it is")
    revision: str | None = setting_of(WorkerSettings, "revision")
    stay: bool = setting(False, help="wait for SIGTERM when the model is there")
    ready_file: str | None = setting(
        None, help="file to create when the model is there, for a readiness probe"
    )


def main(argv: Sequence[str]) -> int:
    """Fetch the model, and stay if `--stay` is given; returns 0. Raises ModelLoadError if the model
    cannot be fetched."""
    settings = settings_or_exit(
        FetchSettings,
        argv,
        prog="baton fetch",
        description="Download a model's files into the cache (HF_HOME) that workers read.",
    )
    stop = threading.Event()
    former = signal.signal(signal.SIGTERM, lambda *_: _stop(stop))
    try:
        print(
            f"{settings.model} is in {resolve_model(settings.model, settings.revision)}", flush=True
        )
        if settings.ready_file is not None:
            Path(settings.ready_file).touch()
        if settings.stay:
            _wait(stop)
    except _Stopped:
        return 0
    finally:
        signal.signal(signal.SIGTERM, former)
    return 0


class _Stopped(BaseException):
    """Raised on SIGTERM, also in the middle of the download. The next download resumes there."""


def _stop(stop: threading.Event) -> None:
    stop.set()
    raise _Stopped


def _wait(stop: threading.Event) -> None:
    while not stop.wait(3600):
        pass
