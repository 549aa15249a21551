"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import setting
from worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """Settings of a decode worker: those of every worker and its own."""

    require_prefill: bool = setting(
        False,
        help="be ready only while some prefill worker can be reached; otherwise a worker without "
        "one computes prompts itself, and its log and metrics say so",
    )
    pod_name: str | None = setting(
        None, help="name of this worker's Kubernetes pod: what happens to it becomes Events"
    )
    pod_uid: str | None = setting(None, help="uid of that pod")
    pod_conditions: bool = setting(
        False,
        help="also keep the condition baton/PrefillReachable in that pod's status; its account "
        "must be allowed to patch pods/status",
    )
    resume_grace_s: float = setting(
        30.0,
        help="how long a stream whose router is gone goes on, and a finished one is kept, for its "
        "client to resume it; 0: not at all",
        unit="s",
        minimum=0,
    )
