"""Where the KV of a prompt came from: the worker's own cache, its tiers below that, other workers'
caches, computing."""

from __future__ import annotations

from typing import Any

from protocol.traces import DecodeTrace, PrefillTrace


def prompt_sources(trace: PrefillTrace | DecodeTrace | None) -> list[dict[str, Any]]:
    """The parts of the prompt, by the place where they were found, with their tokens and
    milliseconds. `trace` is that of the worker that computed the prompt, if it has reported."""
    if trace is None:
        return []
    parts: list[dict[str, Any]] = []
    if trace.cached_tokens:
        parts.append(_part("own cache", trace.worker_id, trace.cached_tokens, 0.0))
    missing = trace.fetched_tokens
    per_block = missing // max(1, sum(each.found for each in trace.fetches))
    for each in trace.fetches:
        if each.found:
            ms = (each.done_us - each.sent_us) / 1000
            source, owner = each.tier or "peer", each.holder or trace.worker_id
            parts.append(_part(source, owner, each.found * per_block, ms))
    computed = sum(each.num_tokens for each in trace.chunks)
    if computed:
        ms = sum(each.end_us - each.start_us for each in trace.chunks) / 1000
        parts.append(_part("computed", trace.worker_id, computed, ms))
    return parts


def _part(source: str, worker_id: str, num_tokens: int, ms: float) -> dict[str, Any]:
    return {"source": source, "worker_id": worker_id, "num_tokens": num_tokens, "ms": ms}
