"""Where the KV of a prompt came from: the worker's own cache, its tiers below that, other workers'
caches, computing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from protocol.traces import ChunkSpan, DecodeTrace, PrefillTrace


def prompt_sources(
    trace: PrefillTrace | DecodeTrace | None, num_tokens: int, num_cached: int
) -> list[dict[str, Any]]:
    """The parts of a prompt of `num_tokens` tokens, by the place where they were found, with their
    tokens and milliseconds. The tokens of all parts that were not computed add up to `num_cached`.
    `trace` is that of the worker that computed the prompt, if it has reported. A preempted sequence
    computes tokens again: they count once, with the time of all chunks before the first token."""
    if trace is None:
        return []
    fetched = _fetched(trace, num_cached)
    own = num_cached - sum(each["num_tokens"] for each in fetched)
    parts = [_part("own cache", trace.worker_id, own, 0.0)] if own else []
    ms = sum(each.end_us - each.start_us for each in _prompt_chunks(trace)) / 1000
    return [*parts, *fetched, _part("computed", trace.worker_id, num_tokens - num_cached, ms)]


def _fetched(trace: PrefillTrace | DecodeTrace, most: int) -> list[dict[str, Any]]:
    """The tokens that came from tiers and from other workers and were not computed again later."""
    per_block = trace.fetched_tokens // max(1, sum(each.found for each in trace.fetches))
    parts = []
    for each in trace.fetches:
        if num_tokens := min(each.found * per_block, most):
            most -= num_tokens
            ms = (each.done_us - each.sent_us) / 1000
            owner = each.holder or trace.worker_id
            parts.append(_part(each.tier or "peer", owner, num_tokens, ms))
    return parts


def _prompt_chunks(trace: PrefillTrace | DecodeTrace) -> Iterable[ChunkSpan]:
    """The chunks before the first token. Later chunks compute the prompt again, after a sequence
    that decoded was preempted."""
    first_us = trace.first_token_us if isinstance(trace, DecodeTrace) else 0
    return [each for each in trace.chunks if not first_us or each.start_us < first_us]


def _part(source: str, worker_id: str, num_tokens: int, ms: float) -> dict[str, Any]:
    return {"source": source, "worker_id": worker_id, "num_tokens": num_tokens, "ms": ms}
