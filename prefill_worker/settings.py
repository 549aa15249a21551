"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(WorkerSettings):
    """Settings of a prefill worker: those of every worker and no others."""

    card_chunk_tokens: ClassVar[int] = 8192
