"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.worker_settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """What a decode worker can be told; nothing, as yet, beyond what every worker can."""
