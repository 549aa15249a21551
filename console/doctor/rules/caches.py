"""Prefix caches that are new, too small, or out of step with the router's hints."""

from __future__ import annotations

from console.doctor.finding import Bar, Change, Evidence, Finding, Number
from console.doctor.observation import Observation, WorkerFacts
from console.doctor.rules.pool_finding import PoolFinding, WorkerBars
from console.doctor.symptoms import median_or_none, serving, urgency
from process.number_text import ms, percent, significant
from protocol.messages import Role

BELOW = 0.15
"""A hit rate counts as different if it is this far below its pool's."""
GAIN = 0.10
"""The gain in hit rate by twice the cache that is worth a finding."""
MIN_PROMPT_TOKENS = 10_000
"""Prompt tokens of a worker below which its hit rate says nothing."""
MISSED_HINTS = 0.05
"""Share of all prompt tokens that placements expected in a cache and that were not there."""
_EVICTIONS = 3.0


def check_cache_thrash(seen: Observation) -> Finding | str:
    """Whether prefixes are evicted before they are used again."""
    for role in Role:
        pool = serving(seen, role)
        small = [each for each in pool if _is_below(each, pool) and _evicts_more(each, pool)]
        if small:
            return _too_small(seen, pool, small[0])
    gain = _gain_of_twice(seen)
    evictions = max((each.evictions_per_s or 0.0 for each in seen.workers), default=0.0)
    if gain is not None and gain >= GAIN and evictions > 0:
        pool = serving(seen, Role.DECODE)
        worst = max(pool, key=lambda each: each.evictions_per_s or 0.0, default=None)
        if worst is not None:
            return _too_small(seen, pool, worst, gain)
    return f"at most {significant(evictions)} blocks/s evicted on a worker"


def _is_below(worker: WorkerFacts, pool: list[WorkerFacts]) -> bool:
    others = median_or_none(
        each.hit_rate for each in pool if each is not worker and _is_known(each)
    )
    if worker.hit_rate is None or others is None or not _is_known(worker):
        return False
    return worker.hit_rate < others - BELOW


def _is_known(worker: WorkerFacts) -> bool:
    return worker.hit_rate is not None and worker.prompt_tokens >= MIN_PROMPT_TOKENS


def _evicts_more(worker: WorkerFacts, pool: list[WorkerFacts]) -> bool:
    others = median_or_none(each.evictions_per_s for each in pool if each is not worker)
    own = worker.evictions_per_s or 0.0
    return own > 0 and own >= _EVICTIONS * (others or 0.0)


def _gain_of_twice(seen: Observation) -> float | None:
    """The gain in hit rate from twice the blocks, by the miss-ratio curve."""
    if seen.cache_blocks is None or not seen.miss_curve:
        return None
    now = min(seen.miss_curve, key=lambda each: abs(each.blocks - (seen.cache_blocks or 0)))
    larger = [each for each in seen.miss_curve if each.blocks <= 2 * seen.cache_blocks]
    return now.miss_ratio - min(each.miss_ratio for each in larger) if larger else None


def _too_small(
    seen: Observation, pool: list[WorkerFacts], worker: WorkerFacts, gain: float | None = None
) -> Finding:
    whole = "The prefix caches are" if gain is not None else f"{worker.worker_id}'s prefix cache is"
    hits = [Number(percent(worker.hit_rate), "hit rate")]
    if gain is None:
        others = median_or_none(each.hit_rate for each in pool if each is not worker)
        hits.append(Number(percent(others), "other workers"))
    else:
        hits.append(Number(f"+{percent(gain)}", "hits with twice the blocks"))
    return PoolFinding(
        rule="cache_thrash",
        title=f"{whole} too small",
        text=(
            f"{worker.worker_id} evicts {significant(worker.evictions_per_s or 0.0)} blocks per "
            "second, and prompts ask for them again: their tokens are computed a second time.",
        ),
        bars=WorkerBars(
            "blocks evicted per second",
            "blocks/s",
            pool,
            lambda each: round(each.evictions_per_s or 0.0, 1),
            lambda each: gain is not None or each is worker,
        ),
        numbers=tuple(hits),
        changes=(
            Change(
                setting="memory_fraction",
                scope=worker.worker_id if gain is None else "pool",
                old=seen.settings.get("memory_fraction"),
                text="More KV blocks (or num_blocks, where that is set). It takes a restart.",
            ),
        ),
    ).to_finding(seen)


def check_cold_cache(seen: Observation) -> Finding | str:
    """Whether a worker has seen too few prompts so far to serve from its cache."""
    window_us = int(seen.window_s * 1e6)
    for role in Role:
        pool = serving(seen, role)
        for each in pool:
            is_young = each.joined_us > 0 and seen.now_us - each.joined_us < window_us
            if is_young and _is_below(each, pool) and not _evicts_more(each, pool):
                return _cold(seen, pool, each)
    return f"no young worker's hit rate is {percent(BELOW)} below its pool's"


def _cold(seen: Observation, pool: list[WorkerFacts], worker: WorkerFacts) -> Finding:
    age_ms = (seen.now_us - worker.joined_us) / 1000
    others = median_or_none(each.hit_rate for each in pool if each is not worker)
    return PoolFinding(
        rule="cold_cache",
        title=f"{worker.worker_id} is new, and its prefix cache still fills",
        text=(
            f"It joined {ms(age_ms)} ago. Its hit rate is {percent(worker.hit_rate)}, the pool's "
            f"{percent(others)}; it rises by itself as prompts come in.",
        ),
        bars=WorkerBars(
            "hit rate",
            "%",
            pool,
            lambda each: round(100 * (each.hit_rate or 0.0), 1),
            lambda each: each is worker,
        ),
        changes=(
            Change(
                setting="rollout",
                scope=f"{worker.role.value} pool",
                text="Wait. In rollouts, leave some minutes between two workers of a pool.",
            ),
        ),
    ).to_finding(seen)


def check_stale_hints(seen: Observation) -> Finding | str:
    """Whether placements expect cached prefixes that are gone."""
    prompt = sum(each.num_prompt_tokens for each in seen.requests)
    missed: dict[str, int] = {}
    for each in seen.requests:
        num_lost = max(0, each.expected_cached_tokens - each.cached_tokens)
        if num_lost and each.decode is not None:
            missed[each.decode] = missed.get(each.decode, 0) + num_lost
    share = sum(missed.values()) / prompt if prompt else 0.0
    if share < MISSED_HINTS:
        return f"{percent(share)} of prompt tokens were expected in a cache and were not there"
    worst = max(missed, key=lambda each: missed[each])
    return Finding(
        rule="stale_hints",
        title="The router's cache index is behind the workers",
        text=(
            f"{percent(share)} of prompt tokens were expected in a cache when their request was "
            f"placed, and were gone when it arrived; most of them on {worst}.",
        ),
        urgency=urgency(seen),
        evidence=Evidence(
            kind="expected tokens that were gone",
            unit="tokens",
            bars=tuple(Bar(name, value, name == worst) for name, value in missed.items()),
            numbers=(Number(percent(share), "of prompt tokens"),),
        ),
        changes=(
            Change(setting="network", scope=worst,
                   text="Events of the worker arrive late or are lost: look at its event port and "
                   "the router's event-loop lag. Where evictions are the cause, see the Cache "
                   "view."),
        ),
    )  # fmt: skip
