"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(WorkerSettings):
    """What a prefill worker can be told; nothing, as yet, beyond what every worker can."""
