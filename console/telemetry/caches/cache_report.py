"""How much the prefix caches save: the object of `GET /cache`.

Owns counts of the last minutes by prefix, and the reuse curve. Receives every placed prompt and
every ended request; the clock is passed in. Knows hashes only, not prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from console.telemetry.caches.reuse import ReuseCurve
from protocol.messages import Role
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.requests.trace import AttemptTrace, Durations, RequestTrace
from router.requests.trace_store import TraceStore
from router.routing.placement import Placement

MINUTE_US = 60_000_000
HISTORY = 60
"""Points of a history, one each minute."""
MAX_PREFIXES = 512
SHOWN_PREFIXES = 20
_SIZES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)


@dataclass
class _Prefix:
    """A cached prefix at the beginning of prompts: `hits` in the last minute and in this one."""

    num_blocks: int
    hits: int = 0
    last_hits: int = 0


@dataclass
class _Tokens:
    """Prompt tokens of one minute by where they came from."""

    computed: int = 0
    hit_prefill: int = 0
    hit_decode: int = 0


@dataclass
class _WorkerHits:
    cached: int = 0
    total: int = 0


class CacheReport:
    """One router's view of all prefix caches."""

    def __init__(self, fleet: Fleet, traces: TraceStore) -> None:
        self._fleet, self._traces = fleet, traces
        self._since_us = traces.wall_us()
        self._minute = 0
        self._curve = ReuseCurve()
        self._prefixes: dict[bytes, _Prefix] = {}
        self._tokens, self._last_tokens = _Tokens(), _Tokens()
        self._hits: dict[str, _WorkerHits] = {}
        self._rates: dict[str, deque[float | None]] = {}
        self._evicted: dict[str, int] = {}
        self._evictions_per_s: dict[str, float] = {}
        self._evictions: deque[float] = deque(maxlen=HISTORY)
        traces.on_ended(self._take_ended)

    def placed(self, hashes: Sequence[bytes], placement: Placement, block_size: int) -> None:
        """Note that a prompt of these blocks was placed for the first time."""
        self._curve.use(hashes)
        chosen = placement.prefill or placement.decode
        held = len(hashes) - -(-max(0, chosen.missing_tokens - 1) // block_size)
        if held <= 0:
            return
        key = hashes[min(held, len(hashes)) - 1]
        found = self._prefixes.get(key)
        if found is None:
            if len(self._prefixes) >= MAX_PREFIXES:
                rarest = min(self._prefixes, key=lambda each: self._prefixes[each].hits)
                del self._prefixes[rarest]
            found = self._prefixes[key] = _Prefix(held)
        found.hits += 1

    def sample(self) -> None:
        """Close the minute if it is over; call this once per second."""
        self._traces.report_ended()
        self._curve.tick()
        if self._traces.wall_us() - self._since_us < (self._minute + 1) * MINUTE_US:
            return
        self._minute += 1
        self._last_tokens, self._tokens = self._tokens, _Tokens()
        for each in self._prefixes.values():
            each.last_hits, each.hits = each.hits, 0
        self._prefixes = {k: p for k, p in self._prefixes.items() if p.last_hits}
        self._close_workers()

    def as_json(self) -> dict[str, Any]:
        """The body of `GET /cache`."""
        self._traces.report_ended()
        tokens, seconds = self._last_tokens, 60.0
        if self._minute == 0:
            tokens = self._tokens
            seconds = max(1.0, (self._traces.wall_us() - self._since_us) / 1e6)
        return {
            "tokens_per_s": {
                "computed": tokens.computed / seconds,
                "prefix_hit_prefill": tokens.hit_prefill / seconds,
                "prefix_hit_decode": tokens.hit_decode / seconds,
            },
            "workers": [
                {
                    "worker_id": each.worker_id,
                    "role": each.role.value,
                    "hit_rate": self._hit_rate(each.worker_id),
                    "hit_rate_history": list(self._rates.get(each.worker_id, ())),
                    "blocks_cached": each.stats.blocks_cached if each.stats else None,
                    "evictions_per_s": self._evictions_per_s.get(
                        each.worker_id, each.evicted_blocks / seconds if self._minute == 0 else None
                    ),
                }
                for each in self._known()
            ],
            "prefixes": self._prefixes_json(),
            "miss_curve": self.curve_json(),
            "evictions_history": list(self._evictions),
            "history_end_us": self._since_us + self._minute * MINUTE_US,
        }

    # -- parts ------------------------------------------------------------------------------

    def _take_ended(self, traces: Sequence[RequestTrace], _: Sequence[Durations]) -> None:
        for trace in traces:
            attempt = trace.first_token_attempt
            if attempt is not None:
                self._count(trace, attempt)

    def _count(self, trace: RequestTrace, attempt: AttemptTrace) -> None:
        saved, total = trace.num_cached_tokens, trace.num_prompt_tokens
        self._tokens.computed += max(0, total - saved)
        if attempt.prefill is not None:
            self._tokens.hit_prefill += saved
            self._note(attempt.prefill.worker_id, saved, total)
            if attempt.decode is not None:
                self._note(attempt.decode.worker_id, attempt.decode.cached_tokens, total)
        elif attempt.decode is not None:
            self._tokens.hit_decode += saved
            self._note(attempt.decode.worker_id, saved, total)

    def _note(self, worker_id: str, cached: int, total: int) -> None:
        hits = self._hits.setdefault(worker_id, _WorkerHits())
        hits.cached += cached
        hits.total += total

    def _close_workers(self) -> None:
        most_evicted = 0.0
        known = {each.worker_id for each in self._known()}
        for each in self._known():
            name = each.worker_id
            rates = self._rates.setdefault(name, deque(maxlen=HISTORY))
            hits = self._hits.get(name)
            rates.append(hits.cached / hits.total if hits and hits.total else None)
            grown = each.evicted_blocks - self._evicted.get(name, 0)
            self._evicted[name] = each.evicted_blocks
            self._evictions_per_s[name] = max(0, grown) / 60
            most_evicted = max(most_evicted, self._evictions_per_s[name])
        self._evictions.append(most_evicted)
        self._hits = {}
        self._rates = {name: self._rates[name] for name in self._rates.keys() & known}
        self._evicted = {name: self._evicted[name] for name in self._evicted.keys() & known}
        self._evictions_per_s = {
            name: self._evictions_per_s[name] for name in self._evictions_per_s.keys() & known
        }

    def _prefixes_json(self) -> list[dict[str, Any]]:
        size = self._fleet.identity.block_size if self._fleet.identity else 0
        rows = sorted(
            self._prefixes.items(), key=lambda each: -_hits_of(each[1]) * each[1].num_blocks
        )
        return [
            {
                "hash": key.hex()[:16],
                "num_tokens": prefix.num_blocks * size,
                "num_blocks": prefix.num_blocks,
                "hits_per_min": _hits_of(prefix),
                "tokens_saved_per_min": _hits_of(prefix) * prefix.num_blocks * size,
                "workers": self._fleet.holders(key),
            }
            for key, prefix in rows[:SHOWN_PREFIXES]
        ]

    def curve_json(self) -> dict[str, Any]:
        """The miss-ratio curve of all caches, taken as one."""
        now = sum(each.info.num_blocks for each in self._known())
        sizes = [round(now * factor) for factor in _SIZES]
        points = zip(sizes, self._curve.miss_ratio(sizes), strict=True)
        return {
            "blocks_now": now,
            "sample_rate": self._curve.sample_rate,
            "points": [
                {"blocks": size, "miss_ratio": ratio, "prefill_pressure": None}
                for size, ratio in points
                if ratio is not None
            ],
        }

    def _hit_rate(self, worker_id: str) -> float | None:
        """The rate of the last complete minute; in the first minute, of the seconds so far."""
        if self._minute > 0:
            return _last(self._rates.get(worker_id))
        hits = self._hits.get(worker_id)
        return hits.cached / hits.total if hits and hits.total else None

    def _known(self) -> list[Worker]:
        return known_workers(self._fleet)


def known_workers(fleet: Fleet) -> list[Worker]:
    """The workers of a fleet in the order in which operators read them."""
    pools = (fleet.known(role) for role in (Role.PREFILL, Role.DECODE))
    return [each for pool in pools for each in sorted(pool, key=lambda each: each.worker_id)]


def _hits_of(prefix: _Prefix) -> int:
    return max(prefix.hits, prefix.last_hits)


def _last(values: deque[float | None] | None) -> float | None:
    return values[-1] if values else None
