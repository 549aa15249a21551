"""Single workers, or pairs, that are worse than their peers; and workers that fail."""

from __future__ import annotations

from console.doctor.finding import Bar, Change, Evidence, Finding, Number, Urgency
from console.doctor.observation import Observation, PairFacts
from console.doctor.rules.decode import SLOW
from console.doctor.rules.pool_finding import PoolFinding, WorkerBars
from console.doctor.rules.ranks import slow_rank
from console.doctor.symptoms import (
    avoided_slowness,
    failed,
    median_or_none,
    serving,
    slowness,
    urgency,
)
from process.number_text import count, integer, ms, percent, rate, times
from protocol.messages import Role

SLOW_AND_AVOIDED = 2.0
"""A worker that routers avoid counts as slow from this ratio on. The ratio is larger than SLOW,
because it is measured over few steps."""
SLOW_LINK = 0.4
"""Below this ratio of a pair's rate to the median of the others, its link counts as slow."""
MIN_BYTES = 64 << 20
"""The fewest bytes in a minute for which a pair's rate is used."""
EXPOSED_MS = 10.0
"""Below this exposed transfer time, nobody notices a slow link."""
MAX_FAILED = 0.001
MAX_RETRIED = 0.05
MAX_LOSSES = 2
MOSTLY = 0.5
"""A worker is the cause of failures if failed attempts are placed on it this many times as often as
good ones."""


def check_slow_worker(seen: Observation) -> Finding | str | None:
    """Whether a worker is slower than the other workers of its pool would be at the same step, or
    one of its ranks is slower than its other ranks."""
    if found := slow_rank(seen):
        return found
    worst = None
    for role in Role:
        pool = serving(seen, role)
        ratios = {each.worker_id: slowness(each, pool) for each in pool}
        known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        worst = max([*known.values(), *([worst] if worst else [])], default=None)
        slow = [name for name, ratio in known.items() if ratio >= SLOW]
        if slow and 2 * len(slow) <= len(pool):
            return _slow_worker(seen, role, slow, known)
    if found := _avoided_worker(seen):
        return found
    return None if worst is None else f"steps at most {times(worst)} those of their pool"


def _avoided_worker(seen: Observation) -> Finding | None:
    """A worker that was so slow lately that routers place nearly all requests elsewhere."""
    for role in Role:
        pool = serving(seen, role)
        ratios = {each.worker_id: avoided_slowness(each, pool) for each in pool}
        known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        slow = [name for name, ratio in known.items() if ratio >= SLOW_AND_AVOIDED]
        if slow and 2 * len(slow) <= len(pool):
            others = {each.worker_id: 1.0 for each in pool}
            return _slow_worker(seen, role, slow, others | known, avoided=True)
    return None


def _slow_worker(
    seen: Observation,
    role: Role,
    slow: list[str],
    ratios: dict[str, float],
    *,
    avoided: bool = False,
) -> Finding:
    names = " and ".join(slow)
    ratio = max(ratios[each] for each in slow)
    text = (
        f"Its last steps took {times(ratio)} as long as the pool's other workers need for the same "
        "work, so routers place requests on those and try it again every few minutes."
        if avoided
        else f"A step takes {times(ratio)} as long there as the pool's other workers need for the "
        "same work."
    )
    return PoolFinding(
        rule="slow_worker",
        title=f"{names} {'is' if len(slow) == 1 else 'are'} slower than the {role.value} pool",
        text=(
            f"{text} A throttled device, a busy neighbour or cores shared with other processes "
            "are the usual causes.",
        ),
        bars=WorkerBars(
            "step time over the pool's",
            "×",
            [each for each in serving(seen, role) if each.worker_id in ratios],
            lambda each: round(ratios[each.worker_id], 2),
            lambda each: each.worker_id in slow,
        ),
        changes=(
            Change(
                setting="host",
                scope=slow[0],
                text="Look at its host: clocks, temperature, other processes.",
            ),
            *_drain(seen, role, slow[0]),
        ),
    ).to_finding(seen)


def _drain(seen: Observation, role: Role, worker_id: str) -> tuple[Change, ...]:
    """The advice to drain a worker, if the others of its pool can carry its load. The pressures and
    the requests that wait there now decide that."""
    pool = serving(seen, role)
    pressure = seen.pressure_prefill if role is Role.PREFILL else seen.pressure_decode
    if len(pool) < 2 or pressure is None or pressure * len(pool) / (len(pool) - 1) >= 1:
        return ()
    others = [each for each in seen.facts.usable(role) if each.worker_id != worker_id]
    is_alone = bool(seen.facts.workers) and not others
    if is_alone or role in seen.short or any(each.is_crowded for each in others):
        return ()
    text = "Until then: its requests move to the other workers, which have room for them."
    return (Change(setting=f"drain {worker_id}", scope=worker_id, live=True, text=text),)


def check_slow_link(seen: Observation) -> Finding | str:
    """Whether KV blocks between two workers take a worse path than possible, or are slow on it."""
    moved = [each for each in seen.pairs if each.bytes_moved]
    slow = [each for each in moved if _is_wrong_path(each) or _is_slow(each, moved)]
    if not slow:
        rates = [each.busy_bytes_per_s for each in moved if each.busy_bytes_per_s]
        if not rates:
            return "no blocks moved between workers"
        return f"{rate(min(rates))} to {rate(max(rates))} while busy"
    first = slow[0]
    title = f"Blocks from {first.prefill} to {first.decode} arrive slowly"
    change = Change(
        setting="network", scope=f"{first.prefill} → {first.decode}",
        text="Compare both hosts' interfaces, their speed and who else uses them.",
    )  # fmt: skip
    if _is_wrong_path(first) and first.narrowed:
        title, change = _forbidden(first)
    elif _is_wrong_path(first) or first.is_below_way:
        title = f"Blocks for {first.decode} go over {first.path} instead of {first.expected_path}"
        if not _is_wrong_path(first):
            title = (
                f"Blocks for {first.decode} move at {rate(first.busy_bytes_per_s or 0)}, slower "
                f"than {first.expected_path} gives"
            )
        both = f"{first.prefill} and {first.decode}"
        text = f"Let UCX use {first.expected_path} in the environments of {both}"
        if first.expected_path == "CUDA IPC":
            text = (
                f"If {both} run in separate containers, let these share the PID and IPC namespaces "
                "and see both cards. Else let UCX use CUDA IPC in their environments"
            )
        change = Change(
            setting="UCX_TLS", scope=first.decode,
            text=f"{text}, and restart them one after the other.",
        )  # fmt: skip
    exposed = max((each.exposed_p95_ms or 0.0 for each in slow), default=0.0)
    return Finding(
        rule="slow_link",
        title=title,
        text=(
            f"Up to {ms(exposed)} (p95) of a transfer is not hidden behind the prompt's "
            f"computation on {count(len(slow), 'pair')} of workers. Clients see it as a late "
            "second token.",
        ),
        urgency=urgency(seen),
        evidence=Evidence(
            kind="rate of a transfer while it runs",
            unit="GB/s",
            bars=tuple(
                Bar(f"{each.prefill} → {each.decode}", round((each.busy_bytes_per_s or 0) / 1e9, 3),
                    each in slow)
                for each in moved
            ),
            numbers=(Number(ms(exposed), "not hidden, p95"),),
        ),
        changes=(change,),
    )  # fmt: skip


def _forbidden(pair: PairFacts) -> tuple[str, Change]:
    """The title and the change for a pair of which a worker forbids the best path."""
    names = " and ".join(pair.narrowed)
    verb = "forbids" if len(pair.narrowed) == 1 else "forbid"
    return (
        f"Blocks for {pair.decode} go over {pair.path}: UCX_TLS of {names} {verb} "
        f"{pair.expected_path}",
        Change(
            setting="UCX_TLS", scope=names,
            text=f"Allow {pair.expected_path} in the environment of {names}, or leave UCX_TLS out, "
            "and restart it.",
        ),
    )  # fmt: skip


def _is_wrong_path(pair: PairFacts) -> bool:
    known = pair.path not in (None, "unknown") and pair.expected_path not in (None, "unknown")
    return known and pair.path != pair.expected_path


def _is_slow(pair: PairFacts, moved: list[PairFacts]) -> bool:
    if pair.is_below_way:
        return True
    measured = [each for each in moved if each.bytes_moved >= MIN_BYTES]
    usual = median_or_none(each.busy_bytes_per_s for each in measured if each is not pair)
    is_noticed = pair in measured and (pair.exposed_p95_ms or 0.0) >= EXPOSED_MS
    if not usual or pair.busy_bytes_per_s is None or not is_noticed:
        return False
    return pair.busy_bytes_per_s < SLOW_LINK * usual


def check_faults(seen: Observation) -> Finding | str:
    """Whether requests fail, are retried often, or a worker comes and goes."""
    requests = max(1, len(seen.requests))
    num_failed = sum(failed(each) for each in seen.requests)
    num_retried = sum(each.num_attempts > 1 for each in seen.requests)
    unstable = [each for each in seen.workers if each.losses >= MAX_LOSSES]
    lost = sum(each.losses for each in seen.workers)
    is_calm = num_failed / requests <= MAX_FAILED and num_retried / requests <= MAX_RETRIED
    if is_calm and not unstable:
        return (
            f"{count(lost, 'worker')} lost, {count(num_retried, 'request')} repeated, "
            f"{integer(num_failed)} failed"
        )
    names = ", ".join(each.worker_id for each in unstable)
    title = f"{names} keeps ending" if unstable else "Requests are repeated or fail"
    culprit = None if unstable else _culprit(seen)
    if culprit is not None:
        names, title = culprit, f"Attempts with {culprit} fail"
    return Finding(
        rule="faults",
        title=title,
        text=(
            f"{count(num_failed, 'request')} of {integer(requests)} failed, {integer(num_retried)} "
            f"had to be repeated, and workers were lost {count(lost, 'time')}.",
        ),
        urgency=Urgency.URGENT if num_failed or unstable else urgency(seen),
        evidence=Evidence(
            kind="losses of workers",
            bars=tuple(
                Bar(each.worker_id, each.losses, each in unstable)
                for each in seen.workers
                if each.losses
            ),
            numbers=(
                Number(percent(num_failed / requests), "failed"),
                Number(percent(num_retried / requests), "repeated"),
            ),
        ),
        changes=(
            Change(setting="logs", scope=names or "workers", text="The last lines of the worker's "
                   "log name the cause: memory, the device, transfers that fail, or a request that "
                   "kills it."),
        ),
    )  # fmt: skip


def _culprit(seen: Observation) -> str | None:
    """The worker of most failed attempts, if requests that end well are seldom placed on it."""
    attempts = [attempt for each in seen.requests for attempt in each.failed_attempts]
    good = [(each.prefill, each.decode) for each in seen.requests if not failed(each)]
    if not attempts or not good:
        return None

    def excess(name: str) -> float:
        bad_share = sum(name in each for each in attempts) / len(attempts)
        return bad_share - sum(name in each for each in good) / len(good)

    worst = max({name for each in attempts for name in each}, key=excess, default=None)
    return worst if worst is not None and excess(worst) >= MOSTLY else None
