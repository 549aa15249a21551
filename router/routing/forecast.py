"""Predicted times to the first token of a placement and its candidates.

Pure. No worker is chosen by these predictions.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.routing.prediction import ttft_ms
from router.routing.view import Mode, Placement, PlacementQuery, WorkerLoad

KEPT_LOADS = 16
"""Of larger fleets only the chosen worker is forecast."""


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """The predictions made when an attempt was placed: the chosen worker's time, and the loads from
    which the candidates' times can be computed."""

    ttft_ms: float | None
    num_tokens: int
    block_size: int
    loads: tuple[WorkerLoad, ...] = ()

    def of_worker(self, worker_id: str) -> float | None:
        """The predicted time for a worker."""
        load = _load_of(worker_id, self.loads)
        return None if load is None else load_ttft_ms(load, self.num_tokens, self.block_size)


def forecast(
    placement: Placement,
    query: PlacementQuery,
    decode: Sequence[WorkerLoad],
    prefill: Sequence[WorkerLoad],
) -> Forecast:
    """The forecast of a placement that was made with these loads."""
    computing = decode if placement.mode is Mode.LOCAL else prefill
    kept = tuple(computing) if len(computing) <= KEPT_LOADS else ()
    ttft = placement_ttft_ms(placement, query.num_tokens, query.block_size, decode, prefill)
    return Forecast(ttft, query.num_tokens, query.block_size, kept)


def placement_ttft_ms(
    placement: Placement,
    num_tokens: int,
    block_size: int,
    decode: Sequence[WorkerLoad],
    prefill: Sequence[WorkerLoad],
) -> float | None:
    """From the start of the attempt to its first token. None if its worker has not reported a step
    model, or if the KV is there already."""
    if placement.mode is Mode.LOCAL:
        chosen, loads = placement.decode, decode
    elif placement.prefill is not None:
        chosen, loads = placement.prefill, prefill
    else:
        return None
    load = _load_of(chosen.worker_id, loads)
    return None if load is None else load_ttft_ms(load, num_tokens, block_size)


def load_ttft_ms(load: WorkerLoad, num_tokens: int, block_size: int) -> float | None:
    """The time to the first token of a prompt of `num_tokens` on a worker with this load."""
    if load.speed is None or not load.speed.is_known:
        return None
    cached = max(load.held_blocks, load.expected_blocks) * block_size
    return ttft_ms(load.speed, load.queued_tokens, num_tokens, min(cached, num_tokens - 1))


def _load_of(worker_id: str, loads: Sequence[WorkerLoad]) -> WorkerLoad | None:
    for each in loads:
        if each.worker_id == worker_id:
            return each
    return None
