"""A fleet of mock workers in virtual time, observed as the router observes a real one.

Prompts queue for prefill workers, which have LRU caches of prefixes; sequences decode in batches
on decode workers, whose steps follow `scheduling.step_model` and whose memory is counted in
blocks. Faults are planted by parameters. Small on purpose: only what the doctor's rules look at.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import msgspec

from console.doctor.observation import (
    Observation,
    PairFacts,
    RequestFacts,
    StepModelFacts,
    Targets,
    WorkerFacts,
)
from protocol.messages import Role
from scheduling.step_model import attended_pairs

BLOCK = 16
START_US = 1_000_000_000_000
PREFILL_MODEL = StepModelFacts(fixed_us=2000, per_token_us=150, per_attended_us=0.02)
DECODE_MODEL = StepModelFacts(fixed_us=12_000, per_token_us=100, per_attended_us=0.02)
TARGETS = Targets(ttft_ms=1000, tpot_ms=40)


@dataclass(frozen=True)
class Plan:
    """A fleet and its load; the defaults are healthy."""

    seed: int = 0
    seconds: float = 120.0
    requests_per_s: float = 6.0
    num_prefill: int = 3
    num_decode: int = 3
    prompt_tokens: tuple[int, ...] = (600, 900, 1200)
    output_tokens: tuple[int, ...] = (40, 80, 120)
    num_prefixes: int = 20
    prefix_tokens: int = 480
    prefix_blocks: tuple[int, ...] = (900, 900, 900)
    """Room of each prefill worker's cache."""
    decode_blocks: int = 8000
    max_batch_size: int = 64
    prefill_model: StepModelFacts = PREFILL_MODEL
    decode_model: StepModelFacts = DECODE_MODEL
    slow: Mapping[str, float] = field(default_factory=dict)
    """Workers whose steps take so many times as long as their model says of a good one."""
    local_share: float = 0.0
    """Share of prompts that decode workers compute between their steps."""
    joined_before_end_s: Mapping[str, float] = field(default_factory=dict)
    hint_lag_evictions: int = 0
    """Evictions of each worker that the router does not know yet."""
    fail_share: float = 0.0
    targets: Targets = TARGETS
    pairs: tuple[PairFacts, ...] = ()


class _Prefill:
    """A prefill worker: one prompt after the other, with a cache of prefixes."""

    def __init__(self, name: str, plan: Plan, room: int) -> None:
        self.name, self.room = name, room
        self.free_at = plan.seconds - plan.joined_before_end_s.get(name, plan.seconds)
        self.joined_s = self.free_at if name in plan.joined_before_end_s else None
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.removed: deque[int] = deque(maxlen=max(1, plan.hint_lag_evictions))
        self.evictions = self.prompt_tokens = self.cached_tokens = self.waited = 0
        self.steps: list[float] = []

    def touch(self, prefix: int, blocks: int) -> bool:
        """Cache the prefix. Returns whether it was cached before."""
        was = prefix in self.cache
        self.cache[prefix] = None
        self.cache.move_to_end(prefix)
        while len(self.cache) * blocks > self.room:
            gone, _ = self.cache.popitem(last=False)
            self.removed.append(gone)
            self.evictions += blocks
        return was

    def is_expected(self, prefix: int, lag: int) -> bool:
        """Whether the router takes the prefix to be cached here."""
        return prefix in self.cache or (lag > 0 and prefix in self.removed)


@dataclass
class _Sequence:
    facts: RequestFacts
    tokens: int
    left: int
    at_s: float
    arrived_s: float
    prefill_tokens: int = 0
    steps: list[tuple[float, bool]] = field(default_factory=list)
    first_token_s: float = 0.0
    preemptions: int = 0


class _Decode:
    """A decode worker: batches of sequences, one step after the other."""

    def __init__(self, name: str, plan: Plan) -> None:
        self.name, self.plan = name, plan
        self.queue: deque[_Sequence] = deque()
        self.done: list[_Sequence] = []
        self.steps: list[tuple[float, int, float]] = []
        self.used: list[float] = []
        self.running_counts: list[int] = []
        self.waiting_counts: list[int] = []
        self.preemptions = 0

    def run(self) -> None:
        """Serve everything that was queued, in the order of arrival."""
        plan, now = self.plan, 0.0
        running: list[_Sequence] = []
        pending = deque(sorted(self.queue, key=lambda each: each.at_s))
        while (pending or running) and now < plan.seconds:
            if not running and pending:
                now = max(now, pending[0].at_s)
            free = plan.decode_blocks - sum(_blocks(each.tokens) for each in running)
            while pending and pending[0].at_s <= now and len(running) < plan.max_batch_size:
                if _blocks(pending[0].tokens) > free:
                    break
                free -= _blocks(pending[0].tokens)
                running.append(pending.popleft())
            if not running:
                now = pending[0].at_s if pending[0].at_s > now else now + 0.01
                continue
            now = self._step(running, pending, now)

    def _step(self, running: list[_Sequence], pending: deque[_Sequence], now: float) -> float:
        plan = self.plan
        chunk = next((each for each in running if each.prefill_tokens), None)
        tokens = len(running)
        attended: float = sum(each.tokens for each in running)
        if chunk is not None:
            tokens += chunk.prefill_tokens
            attended += attended_pairs(chunk.prefill_tokens, 0)
        took = plan.decode_model.predict_ms(tokens, attended) / 1000 * plan.slow.get(self.name, 1)
        now += took
        if chunk is None:
            self.steps.append((took, tokens, attended))
        self.running_counts.append(len(running))
        waiting = itertools.takewhile(lambda each: each.at_s <= now, pending)  # in order of `at_s`
        self.waiting_counts.append(sum(1 for _ in waiting))
        for each in list(running):
            if each is chunk:
                each.prefill_tokens, each.first_token_s = 0, now
                continue
            each.steps.append((took, chunk is not None))
            each.tokens, each.left = each.tokens + 1, each.left - 1
            if each.left <= 0:
                running.remove(each)
                each.at_s = now
                self.done.append(each)
        while sum(_blocks(each.tokens) for each in running) > plan.decode_blocks:
            victim = running.pop()
            victim.at_s, victim.preemptions = now, victim.preemptions + 1
            self.preemptions += 1
            pending.appendleft(victim)
        self.used.append(sum(_blocks(each.tokens) for each in running))
        return now


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def observe(plan: Plan) -> Observation:
    """Run the plan, and observe its whole time as one window."""
    rng = random.Random(plan.seed)
    prefill = [_Prefill(f"prefill-{i}", plan, plan.prefix_blocks[i % len(plan.prefix_blocks)])
               for i in range(plan.num_prefill)]  # fmt: skip
    decode = [_Decode(f"decode-{i}", plan) for i in range(plan.num_decode)]
    now, number = 0.0, 0
    while now < plan.seconds:
        now += rng.expovariate(plan.requests_per_s)
        number += 1
        _send(plan, rng, now, number, prefill, decode)
    for each in decode:
        each.run()
    requests = [_facts(plan, each, rng) for worker in decode for each in worker.done]
    return Observation(
        now_us=START_US + int(plan.seconds * 1e6),
        window_s=plan.seconds,
        workers=(
            *(_prefill_facts(plan, each) for each in prefill),
            *(_decode_facts(plan, each) for each in decode),
        ),
        pairs=plan.pairs,
        requests=tuple(requests),
        targets=plan.targets,
        pressure_prefill=_load(plan, prefill),
        pressure_decode=median(median(each.used or [0]) for each in decode) / plan.decode_blocks,
    )


def _send(
    plan: Plan, rng: random.Random, now: float, number: int,
    prefill: list[_Prefill], decode: list[_Decode],
) -> None:  # fmt: skip
    prompt, output = rng.choice(plan.prompt_tokens), rng.choice(plan.output_tokens)
    prefix = min(int(rng.expovariate(4 / plan.num_prefixes)), plan.num_prefixes - 1)
    target = decode[number % len(decode)]
    facts = RequestFacts(
        received_us=START_US + int(now * 1e6), decode=target.name, num_prompt_tokens=prompt,
        num_output_tokens=output,
    )  # fmt: skip
    if rng.random() < plan.local_share or not prefill:
        target.queue.append(_Sequence(facts, prompt, output, now, now, prefill_tokens=prompt))
        return
    usable = [each for each in prefill if each.joined_s is None or now >= each.joined_s]
    lag = plan.hint_lag_evictions
    source = min(
        usable,
        key=lambda each: (
            max(0.0, each.free_at - now) - (0.05 if each.is_expected(prefix, lag) else 0.0)
        ),
    )
    expected = plan.prefix_tokens if source.is_expected(prefix, lag) else 0
    cached = plan.prefix_tokens if source.touch(prefix, _blocks(plan.prefix_tokens)) else 0
    new = prompt - min(cached, prompt - 1)
    attended = attended_pairs(new, prompt - new)
    took = plan.prefill_model.predict_ms(new, attended) / 1000 * plan.slow.get(source.name, 1)
    begin = max(now, source.free_at)
    source.free_at = begin + took
    source.prompt_tokens, source.cached_tokens = (
        source.prompt_tokens + prompt, source.cached_tokens + cached,
    )  # fmt: skip
    source.steps.append(took)
    source.waited += begin > now
    first = {"queue": (begin - now) * 1e3, "prefill": took * 1e3, "delivery": 2.0}
    ttft = sum(first.values())
    facts = replace_facts(
        facts, prefill=source.name, cached_tokens=cached, expected_cached_tokens=expected,
        ttft_ms=ttft, first=first,
    )  # fmt: skip
    arrival = now + ttft / 1e3
    sequence = _Sequence(facts, prompt, output, arrival, now, first_token_s=arrival)
    target.queue.append(sequence)


def replace_facts(facts: RequestFacts, **changes: object) -> RequestFacts:
    """A copy of the facts with other values."""
    return msgspec.structs.replace(facts, **changes)


def _facts(plan: Plan, done: _Sequence, rng: random.Random) -> RequestFacts:
    facts, steps = done.facts, [took for took, _ in done.steps]
    if facts.ttft_ms is None:
        ttft = (done.first_token_s - done.arrived_s) * 1e3
        facts = replace_facts(facts, ttft_ms=ttft, first={"prefill": ttft})
    usual = median(steps)
    long = [(took, shared) for took, shared in done.steps if took > 2 * usual]
    quarter = len(steps) // 4
    is_failed = rng.random() < plan.fail_share
    return replace_facts(
        facts,
        outcome="failed" if is_failed else "finished",
        tpot_ms=(done.at_s - done.first_token_s) * 1e3 / max(1, len(steps)),
        num_steps=len(steps),
        num_long_steps=len(long),
        num_long_shared_steps=sum(shared for _, shared in long),
        long_step_ms=median(took for took, _ in long) * 1e3 if long else None,
        rest={
            "decode": sum(steps) * 1e3,
            "transfer": max(0.0, (done.at_s - done.first_token_s - sum(steps)) * 1e3),
        },
        early_step_ms=median(steps[:quarter]) * 1e3 if quarter >= 8 else None,
        late_step_ms=median(steps[-quarter:]) * 1e3 if quarter >= 8 else None,
    )


def _load(plan: Plan, prefill: list[_Prefill]) -> float | None:
    if not prefill:
        return None
    busy = sum(sum(each.steps) for each in prefill)
    return busy / (plan.seconds * len(prefill))


def _prefill_facts(plan: Plan, worker: _Prefill) -> WorkerFacts:
    tokens = (worker.prompt_tokens - worker.cached_tokens) / max(1, len(worker.steps))
    slow = plan.slow.get(worker.name, 1.0)
    model = plan.prefill_model
    return WorkerFacts(
        worker_id=worker.name,
        role=Role.PREFILL,
        joined_us=START_US + int((worker.joined_s or -3600) * 1e6),
        num_waiting=worker.waited / max(1, len(worker.steps)),
        blocks_total=16_000,
        blocks_used=800,
        num_steps=len(worker.steps),
        step_ms=1e3 * sum(worker.steps) / len(worker.steps) if worker.steps else None,
        step_tokens=tokens,
        step_attended=attended_pairs(round(tokens), plan.prefix_tokens),
        step_model=_times(model, slow),
        hit_rate=worker.cached_tokens / worker.prompt_tokens if worker.prompt_tokens else None,
        prompt_tokens=worker.prompt_tokens,
        evictions_per_s=worker.evictions / plan.seconds,
    )


def _decode_facts(plan: Plan, worker: _Decode) -> WorkerFacts:
    steps = worker.steps
    return WorkerFacts(
        worker_id=worker.name,
        role=Role.DECODE,
        joined_us=START_US - 3_600_000_000,
        num_waiting=_mean(worker.waiting_counts),
        num_running=_mean(worker.running_counts),
        max_batch_size=plan.max_batch_size,
        blocks_total=plan.decode_blocks,
        blocks_used=_mean(worker.used),
        num_steps=len(steps),
        step_ms=1e3 * median(each[0] for each in steps) if steps else None,
        step_tokens=_mean([each[1] for each in steps]),
        step_attended=_mean([each[2] for each in steps]),
        step_model=_times(plan.decode_model, plan.slow.get(worker.name, 1.0)),
        preemptions=worker.preemptions,
    )


def _times(model: StepModelFacts, factor: float) -> StepModelFacts:
    return StepModelFacts(
        fixed_us=model.fixed_us * factor,
        per_token_us=model.per_token_us * factor,
        per_attended_us=model.per_attended_us * factor,
    )


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
