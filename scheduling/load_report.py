"""The load of a worker, real or simulated, as the scheduler and its step model know it. Pure."""

from __future__ import annotations

from typing import Any

from protocol.events import WorkerStats
from scheduling.scheduler import Scheduler
from scheduling.step_model import StepTotals


def load_report(scheduler: Scheduler, **others: Any) -> WorkerStats:
    """The load of a worker. `others` are the fields that the scheduler does not know."""
    blocks, roster = scheduler.blocks, scheduler.roster
    fixed, per_token, per_attended = scheduler.model.coefficients
    return WorkerStats(
        num_waiting=len(roster.waiting),
        num_running=roster.num_begun,
        queued_tokens=roster.queued_tokens,
        blocks_total=blocks.num_blocks,
        blocks_used=scheduler.blocks_used,
        blocks_cached=scheduler.pools.num_cached_free,
        blocks_retained=len(blocks.retention),
        blocks_waiting=roster.blocks_waiting,
        blocks_granted=roster.blocks_granted,
        step_fixed_us=fixed * 1e6,
        step_per_token_us=per_token * 1e6,
        step_per_attended_us=per_attended * 1e6,
        **others,
    )


def step_counters(totals: StepTotals) -> dict[str, int]:
    """The counters of steps and of their predictions, by name."""
    return {
        "step_us": round(totals.seconds * 1e6),
        "predicted_step_us": round(totals.predicted_s * 1e6),
        "step_error_us": round(totals.error_s * 1e6),
    }
