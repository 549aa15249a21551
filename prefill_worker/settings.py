"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.settings import setting
from runtime.worker_settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(WorkerSettings):
    """What a prefill worker can be told, beyond what every worker can."""

    grant_margin_ms: int = setting(
        250,
        help="a write is posted only if its grant lives at least this much longer",
        unit="ms",
        minimum=1,
    )
