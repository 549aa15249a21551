"""Late first tokens: a pool without room, or prompts that take long to compute."""

from __future__ import annotations

from statistics import median

from console.doctor.client_goodput import MIN_BAD, clients_of
from console.doctor.finding import Change, Evidence, Finding, Number
from console.doctor.observation import MIN_REQUESTS, Observation, RequestFacts, WorkerFacts
from console.doctor.rules.decode import is_memory_full
from console.doctor.rules.pool_finding import PoolFinding, WorkerBars, one_more_worker
from console.doctor.rules.targets import unreachable_ttft_ms
from console.doctor.symptoms import (
    first_token_share,
    is_ttft_high,
    late_requests,
    percentile,
    serving,
    ttft_p95_ms,
    urgency,
)
from process.number_text import count, ms, percent, significant, times
from protocol.messages import Role

QUEUE_SHARE = 0.4
"""If waiting takes more than this share of late first tokens' time, workers are lacking; otherwise
the work itself takes long."""
HAS_ROOM = 0.7
"""Below this pressure, a pool could give a worker away."""
FEW_PLACES = 32
"""Below this number of places in a batch, more places may be the remedy."""


def check_pool_balance(seen: Observation) -> Finding | str | None:
    """Whether requests wait for a pool: prompts for prefill, or sequences for decode. If decode
    workers have no free blocks, prefill workers cannot release theirs, so prompts wait there,
    too."""
    late = late_requests(seen)
    waits = percentile((_queue_ms(each) for each in seen.requests), 0.95)
    role = _short_now(seen)
    if role is not None:
        return _short(seen, role, waits)
    if is_memory_full(seen):
        return None
    has_judgement = len(seen.requests) >= MIN_REQUESTS
    is_queue = first_token_share(late, "queue", "dispatch") >= QUEUE_SHARE
    if has_judgement and is_ttft_high(seen) and is_queue and unreachable_ttft_ms(seen) is None:
        by_prefill = [each for each in late if each.prefill is not None]
        role = Role.PREFILL if 2 * len(by_prefill) >= len(late) else Role.DECODE
        return _short(seen, role, waits)
    decode = serving(seen, Role.DECODE)
    crowded = [each for each in decode if each.num_waiting >= 1 and each.is_full_of_sequences]
    if has_judgement and decode and 2 * len(crowded) > len(decode):
        return _short(seen, Role.DECODE, waits)
    pressures = (seen.pressure_prefill, seen.pressure_decode)
    if seen.short or all(each is None or each > 1 for each in pressures):
        return None
    if any(each is not None and each > 1 for each in pressures):
        return None
    return f"prefill {times(seen.pressure_prefill)}, decode {times(seen.pressure_decode)}"


def _short_now(seen: Observation) -> Role | None:
    """The pool that lacks room now, or None. Decode lacks room if most of its workers are crowded,
    and either requests are late or the pool is short by its pressure. Prefill lacks room if
    requests are late and wait there, and the pool is short by its pressure."""
    clients = clients_of(seen.facts)
    decode = seen.facts.usable(Role.DECODE)
    crowded = [each for each in decode if each.is_crowded]
    is_late = clients.late >= MIN_BAD
    if 2 * len(crowded) > len(decode) and (is_late or Role.DECODE in seen.short):
        return Role.DECODE
    if not is_late or is_memory_full(seen):
        return None
    prefill = seen.facts.usable(Role.PREFILL)
    waits = sum(each.num_waiting for each in prefill)
    return Role.PREFILL if waits >= MIN_BAD and Role.PREFILL in seen.short else None


def _queue_ms(request: RequestFacts) -> float:
    return request.first.get("queue", 0.0)


def _short(seen: Observation, role: Role, waits_ms: float | None) -> Finding:
    pool = serving(seen, role)
    now = seen.facts.usable(role)
    name, other_role = role.value, Role.DECODE if role is Role.PREFILL else Role.PREFILL
    own, other = seen.pressure_prefill, seen.pressure_decode
    if role is Role.DECODE:
        own, other = other, own
    lost = sum(1 for each in seen.workers if each.role is role and each.state == "lost")
    cause = f" {count(lost, 'worker')} of the pool {'is' if lost == 1 else 'are'} lost." * bool(
        lost
    )
    waiting = max(
        sum(each.num_waiting for each in pool), float(sum(each.num_waiting for each in now))
    )
    what = f"{significant(waiting)} requests wait for a place in a batch."
    if role is Role.PREFILL:
        what = "Prompts wait for a worker; computing them does not take long."
        if waits_ms is not None:
            what = f"Prompts wait {ms(waits_ms)} (p95) for a worker; computing them is not what "
            what += "takes long."
    first = f"{what} {count(len(now or pool), 'worker')} cannot keep up with the load." + cause
    has_spare = len(serving(seen, other_role)) > 1 and other is not None and other < HAS_ROOM
    text = (
        f"Move one from the {other_role.value} pool, which has room ({times(other)})."
        if has_spare
        else "Add a worker: the other pool has none to give."
    )
    changes = [one_more_worker(name, len(pool), text)]
    if role is Role.DECODE and sum(each.max_batch_size or 0 for each in pool) < FEW_PLACES * len(
        pool
    ):
        changes.append(
            Change(
                setting="max_batch_size",
                scope="decode pool",
                old=_common_size(pool),
                text="More places, if steps with more sequences stay within the target.",
            )
        )
    return PoolFinding(
        rule="pool_balance",
        title=f"{name.capitalize()} is short",
        text=tuple(filter(None, (first, _missed_text(seen)))),
        bars=WorkerBars(
            "requests that wait, by worker",
            "requests",
            pool,
            lambda each: round(each.num_waiting, 1),
        ),
        numbers=(
            Number(ms(waits_ms), "queue p95")
            if role is Role.PREFILL
            else Number(significant(waiting), "requests wait"),
            Number(times(own), name),
            Number(times(other), other_role.value),
        ),
        changes=tuple(changes),
    ).to_finding(seen)


def _common_size(pool: list[WorkerFacts]) -> str | None:
    sizes = {each.max_batch_size for each in pool}
    return str(sizes.pop()) if len(sizes) == 1 else None


def _missed_text(seen: Observation) -> str:
    waiting = clients_of(seen.facts).late
    if waiting and len(seen.requests) < MIN_REQUESTS:
        return f"{count(waiting, 'request')} wait longer than the target for the first token."
    late = len(late_requests(seen))
    if not late:
        return ""
    return f"{percent(late / len(seen.requests))} of requests miss the target for the first token."


def check_prefill_slow(seen: Observation) -> Finding | str | None:
    """Whether first tokens are late although workers begin the prompts at once."""
    late = late_requests(seen)
    p95 = ttft_p95_ms(seen)
    passed = f"TTFT p95 {ms(p95)} of {ms(seen.targets.ttft_ms)}"
    if not is_ttft_high(seen):
        return passed
    if unreachable_ttft_ms(seen) is not None:
        return None
    if first_token_share(late, "queue", "dispatch") >= QUEUE_SHARE:
        return None
    shares = {
        "the chunks of the prompts": first_token_share(late, "prefill"),
        "other prompts' chunks between them": first_token_share(late, "between_chunks"),
        "attempts that failed": first_token_share(late, "lost_attempt"),
    }
    cause, share = max(shares.items(), key=lambda each: each[1])
    if share < QUEUE_SHARE or cause == "attempts that failed":
        return None
    return _slow_prompts(seen, late, cause, share)


def _slow_prompts(seen: Observation, late: list[RequestFacts], cause: str, share: float) -> Finding:
    length = median(each.num_prompt_tokens for each in late)
    others = [each.num_prompt_tokens for each in seen.requests if each not in late]
    hits = sum(each.cached_tokens for each in late) / max(
        1, sum(each.num_prompt_tokens for each in late)
    )
    is_mixed = cause.startswith("other")
    text = (
        f"{percent(share)} of late first tokens' time is {cause}. Late prompts have "
        f"{count(length, 'token')} (median), of which {percent(hits)} came from a cache."
    )
    changes = [
        Change(
            setting="max_batch_size",
            scope="prefill pool",
            old=seen.settings.get("prefill.max_batch_size"),
            text="Fewer prompts side by side: each of them finishes sooner.",
        )
        if is_mixed
        else Change(
            setting="prefix cache",
            scope="application",
            text="Put what all prompts share first, so that it is computed once; the Cache view "
            "shows whether a larger cache would help.",
        ),
        Change(
            setting="prefill workers",
            scope="prefill pool",
            text="Faster devices, or weights of fewer bits: a further worker shortens queues, not "
            "a single prompt.",
        ),
    ]
    numbers = [
        Number(ms(ttft_p95_ms(seen)), "TTFT p95"),
        Number(significant(length), "tokens, late prompts"),
        Number(percent(hits), "from a cache"),
    ]
    if others:
        numbers.append(Number(significant(median(others)), "tokens, other prompts"))
    title = "Prompts share their workers' steps" if is_mixed else "Prompts take long to compute"
    return Finding(
        rule="prefill_slow",
        title=title,
        text=(text, _missed_text(seen)),
        urgency=urgency(seen),
        evidence=Evidence(kind="late prompts", numbers=tuple(numbers)),
        changes=tuple(changes),
    )
