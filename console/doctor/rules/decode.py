"""Late later tokens: slow steps, long contexts, stalls, and pools without memory."""

from __future__ import annotations

from statistics import median

from console.doctor.finding import Bar, Change, Evidence, Finding, Number
from console.doctor.observation import Observation, RequestFacts, WorkerFacts
from console.doctor.rules.pool_finding import PoolFinding, WorkerBars, kv_in_fp8, one_more_worker
from console.doctor.rules.targets import unreachable_tpot_ms
from console.doctor.symptoms import (
    is_tpot_high,
    is_ttft_high,
    median_or_none,
    serving,
    slowness,
    tpot_p95_ms,
    urgency,
)
from process.number_text import count, integer, ms, percent, significant, times
from protocol.messages import Role

GROWTH = 1.5
"""From this ratio of late to early decode steps, an output counts as slowing down."""
LONG_STEPS = 0.01
"""Streams stutter from this share of decode steps that take over twice their request's median and
longer than a token's target."""
SHARED = 0.6
"""If this share of the long steps computed prompt tokens, prefill is their cause."""
FULL, NEARLY_FULL = 0.9, 0.7
"""A pool counts as full from these shares of blocks in use: the first if sequences lose their
blocks, the second if requests wait although batches have places, because large prompts do not
fit."""
_HALF_THE_BYTES = "Half the bytes to read per token."
_FASTER = Change(
    setting="devices",
    scope="decode pool",
    text="Faster devices, or a smaller model: KV and weights have few bits already.",
)
NEARLY_LATE = 0.8
"""Up to this share of a token's target, the median step does not make tokens late."""
SLOW = 1.3
"""From this ratio of its step time to its pool's, a worker counts as slow."""


def check_decode_slow(seen: Observation) -> Finding | str | None:
    """Whether later tokens are late because every decode step takes long."""
    passed = f"TPOT p95 {ms(tpot_p95_ms(seen))} of {ms(seen.targets.tpot_ms)}"
    if not is_tpot_high(seen):
        return passed
    if unreachable_tpot_ms(seen) is not None:
        return None
    for explains in (is_memory_full, grows_with_output, has_stalls, has_slow_worker):
        if explains(seen):
            return None
    decode = serving(seen, Role.DECODE)
    step_ms = median_or_none(each.step_ms for each in decode)
    is_fast = step_ms is not None and step_ms <= NEARLY_LATE * seen.targets.tpot_ms
    if _step_share(seen) < 0.5 or is_fast:
        return None  # late because of waiting, or of single steps
    causes = [_largest_term(each) for each in decode]
    cause = max(set(causes), key=causes.count) if causes else "fixed"
    words, change = {
        "tokens": (
            "the number of sequences in a batch",
            one_more_worker(
                "decode",
                len(decode),
                "Smaller batches on more workers; or a smaller max_batch_size, with which requests "
                "wait instead.",
            ),
        ),
        "attended": (
            "reading the KV of the sequences, so by contexts and memory bandwidth",
            next(iter(kv_in_fp8(seen, _HALF_THE_BYTES)), _FASTER),
        ),
        "fixed": (
            "its fixed cost: it reads the weights and starts kernels",
            _smaller_weights(seen),
        ),
    }[cause]
    running = sum(each.num_running for each in decode) / len(decode) if decode else 0.0
    return PoolFinding(
        rule="decode_slow",
        title="Decode steps are slow",
        text=(
            f"First tokens are {'late, too' if is_ttft_high(seen) else 'in time'}; each later one "
            f"takes {ms(tpot_p95_ms(seen))} (p95). A step's time is mostly {words}.",
        ),
        bars=WorkerBars(
            "decode step, by worker", "ms", decode, lambda each: round(each.step_ms or 0.0, 2)
        ),
        numbers=(
            Number(ms(tpot_p95_ms(seen)), "TPOT p95"),
            Number(ms(median_or_none(each.step_ms for each in decode)), "step, median"),
            Number(significant(running), "sequences per worker"),
        ),
        changes=(change,),
    ).to_finding(seen)


def _smaller_weights(seen: Observation) -> Change:
    """The change to weights of fewer bits, if possible."""
    old = seen.settings.get("weights")
    new = "int4" if old in ("int8", "fp8") else "int8"
    if old == "int4":
        return _FASTER
    return Change(
        setting="weights", scope="decode pool", old=old, new=new,
        text="Fewer bytes to read per step. Answers change: compare them first.",
    )  # fmt: skip


def _step_share(seen: Observation) -> float:
    """Share of decode steps in the time after the first token, of requests with late tokens."""
    late = [each for each in seen.requests if (each.tpot_ms or 0.0) > seen.targets.tpot_ms]
    whole = sum(sum(each.rest.values()) for each in late)
    steps = sum(each.rest.get(name, 0.0) for each in late for name in ("decode", "shared_decode"))
    return steps / whole if whole else 0.0


def _largest_term(worker: WorkerFacts) -> str:
    model = worker.step_model
    if model is None:
        return "fixed"
    terms = {
        "fixed": model.fixed_us,
        "tokens": model.per_token_us * (worker.step_tokens or 0.0),
        "attended": model.per_attended_us * (worker.step_attended or 0.0),
    }
    return max(terms, key=lambda each: terms[each])


def check_long_output(seen: Observation) -> Finding | str:
    """Whether streams begin fast and slow down as they grow."""
    growth = _growth(seen)
    if not grows_with_output(seen):
        if growth is None:
            return "no output was long enough to tell"
        return f"late steps take {times(growth)} as long as early ones"
    long = _long_outputs(seen)
    early = median_or_none(each.early_step_ms for each in long)
    late = median_or_none(each.late_step_ms for each in long)
    return Finding(
        rule="long_output",
        title="Streams slow down as they grow",
        text=(
            f"The first quarter of a long output takes {ms(early)} per token, the last "
            f"{ms(late)}: each step reads the KV of all earlier tokens.",
        ),
        urgency=urgency(seen),
        evidence=Evidence(
            kind="time per token",
            unit="ms",
            bars=(
                Bar("first quarter", round(early or 0.0, 2)),
                Bar("last quarter", round(late or 0.0, 2), is_flagged=True),
            ),
            numbers=(
                Number(times(growth), "last over first"),
                Number(integer(median(each.num_output_tokens for each in long)), "tokens, median"),
            ),
        ),
        changes=(
            *kv_in_fp8(seen, _HALF_THE_BYTES),
            Change(setting="max_context", scope="decode pool",
                   old=seen.settings.get("max_context"), text="Shorter, if no application needs "
                   "so much."),
        ),
    )  # fmt: skip


def _long_outputs(seen: Observation) -> list[RequestFacts]:
    return [each for each in seen.requests if each.early_step_ms and each.late_step_ms]


def _growth(seen: Observation) -> float | None:
    return median_or_none(
        each.late_step_ms / each.early_step_ms
        for each in _long_outputs(seen)
        if each.late_step_ms and each.early_step_ms
    )


def grows_with_output(seen: Observation) -> bool:
    """Whether late steps are so much slower than early ones that they miss the target."""
    growth, long = _growth(seen), _long_outputs(seen)
    late = median_or_none(each.late_step_ms for each in long)
    early = median_or_none(each.early_step_ms for each in long)
    if growth is None or late is None or early is None or unreachable_tpot_ms(seen) is not None:
        return False
    return growth >= GROWTH and late > seen.targets.tpot_ms >= early


def check_stalls(seen: Observation) -> Finding | str | None:
    """Whether streams stutter because prompts are computed between their tokens. Nothing is found
    while the prefill pool is short, because no other worker has room for the prompts."""
    if Role.PREFILL in seen.short:
        return None
    steps, long, shared = _steps(seen)
    if not has_stalls(seen):
        if not steps or long / steps >= LONG_STEPS:
            return None  # steps stand out, and no prompt is the reason
        return f"{percent(long / steps)} of decode steps exceed 2× the median and the TPOT target"
    return Finding(
        rule="stalls",
        title="Prompts on decode workers hold up streams",
        text=(
            f"{percent(long / steps)} of decode steps take over twice their stream's median and "
            f"longer than the TPOT target of {ms(seen.targets.tpot_ms)}. {percent(shared / long)} "
            "of these also computed prompt tokens of other requests.",
        ),
        urgency=urgency(seen),
        evidence=Evidence(
            kind="decode steps",
            numbers=(
                Number(percent(long / steps), "stand out"),
                Number(percent(shared / long), "of these with prompt tokens"),
            ),
        ),
        changes=(
            *_prompts_elsewhere(seen),
            Change(setting="itl_target_ms", scope="decode pool",
                   old=seen.settings.get("itl_target_ms"), live=True,
                   text="A smaller value makes the chunks beside running streams shorter."),
        ),
    )  # fmt: skip


def _prompts_elsewhere(seen: Observation) -> tuple[Change, ...]:
    """The change with which decode workers compute fewer prompts, if there is one."""
    if not serving(seen, Role.PREFILL):
        text = "Without a prefill pool, decode workers compute all prompts."
        return (one_more_worker("prefill", 0, text),)
    return ()


def has_stalls(seen: Observation) -> bool:
    """Whether steps with prompt tokens stand out among the decode steps."""
    steps, long, shared = _steps(seen)
    return steps > 0 and long / steps >= LONG_STEPS and shared >= SHARED * long


def _steps(seen: Observation) -> tuple[int, int, int]:
    """The numbers of decode steps, of steps that stand out, and of steps that stand out and
    computed prompt tokens. A step that keeps a token's target does not stand out."""
    noticed = [e for e in seen.requests if (e.long_step_ms or 0.0) > seen.targets.tpot_ms]
    return (
        sum(each.num_steps for each in seen.requests),
        sum(each.num_long_steps for each in noticed),
        sum(each.num_long_shared_steps for each in noticed),
    )


def check_memory_full(seen: Observation) -> Finding | str:
    """Whether decode workers lack memory, not computing power."""
    decode = serving(seen, Role.DECODE)
    if not is_memory_full(seen):
        most = max((each.used_share for each in decode), default=0.0)
        preemptions = count(sum(each.preemptions for each in decode), "preemption")
        return f"blocks in use {percent(most)} or less, {preemptions}"
    preempted = sum(each.preemptions for each in decode)
    waiting = sum(each.num_waiting for each in decode)
    return PoolFinding(
        rule="memory_full",
        title="Decode is out of KV memory, not of computing power",
        text=(
            f"The pools of KV blocks are full while {significant(waiting)} requests wait for "
            f"blocks, and {count(preempted, 'sequence')} lost theirs and had to be computed again. "
            "Batches are far below their limit.",
        ),
        bars=WorkerBars(
            "KV blocks in use", "%", decode, lambda each: round(100 * each.used_share), _is_full
        ),
        numbers=(
            Number(integer(preempted), "preemptions"),
            Number(significant(waiting), "requests wait"),
            Number(significant(sum(each.num_running for each in decode)), "run"),
        ),
        changes=(
            *kv_in_fp8(seen, "Twice the tokens in the same memory."),
            Change(
                setting="memory_fraction",
                scope="decode pool",
                old=seen.settings.get("memory_fraction"),
                text="More blocks, if the device has memory left (or num_blocks, where that is "
                "set).",
            ),
            one_more_worker("decode", len(decode), "Another pool of blocks."),
        ),
    ).to_finding(seen)


def is_memory_full(seen: Observation) -> bool:
    """Whether most decode workers are full of blocks, far from full of sequences."""
    decode = serving(seen, Role.DECODE)
    full = [each for each in decode if _is_full(each)]
    return bool(decode) and 2 * len(full) > len(decode)


def _is_full(worker: WorkerFacts) -> bool:
    limit = worker.max_batch_size
    if limit is not None and worker.num_running >= 0.9 * limit:
        return False
    is_full = worker.preemptions > 0 and worker.used_share >= FULL
    return is_full or (worker.num_waiting >= 0.5 and worker.used_share >= NEARLY_FULL)


def has_slow_worker(seen: Observation) -> bool:
    """Whether a decode worker's steps take much longer than its pool's."""
    pool = serving(seen, Role.DECODE)
    return any((slowness(each, pool) or 0.0) >= SLOW for each in pool)
