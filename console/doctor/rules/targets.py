"""Targets that even an idle fleet cannot meet."""

from __future__ import annotations

from statistics import median

from console.doctor.finding import Change, Evidence, Finding, Number
from console.doctor.observation import Observation, RequestFacts
from console.doctor.symptoms import is_tpot_high, is_ttft_high, median_or_none, serving, urgency
from process.number_text import ms
from protocol.messages import Role

RULE = "targets"


def check_targets(seen: Observation) -> Finding | str:
    """Whether an idle fleet would meet the targets: the median prompt alone on a prefill worker,
    and one sequence alone on a decode worker."""
    ttft, tpot = unreachable_ttft_ms(seen), unreachable_tpot_ms(seen)
    texts, changes, numbers = [], [], []
    if ttft is not None:
        texts.append(
            f"A prompt of the usual length takes {ms(ttft)} when nothing else runs: no queue can "
            f"be short enough for a target of {ms(seen.targets.ttft_ms)}."
        )
        changes.append(_raise("ttft_target_ms", seen.targets.ttft_ms, ttft))
        numbers.append(Number(ms(ttft), "first token, idle fleet"))
    if tpot is not None:
        texts.append(
            f"A sequence alone on its worker takes {ms(tpot)} per token: no batch can be small "
            f"enough for a target of {ms(seen.targets.tpot_ms)}."
        )
        changes.append(_raise("tpot_target_ms", seen.targets.tpot_ms, tpot))
        numbers.append(Number(ms(tpot), "next token, idle fleet"))
    if not texts:
        idle, target = _alone_ttft_ms(seen), ms(seen.targets.ttft_ms)
        return f"an idle fleet answers within {ms(idle)} of {target}" if idle else "not measured"
    return Finding(
        rule=RULE,
        title="The targets are out of reach for this model on these machines",
        text=tuple(texts),
        urgency=urgency(seen),
        evidence=Evidence(kind="numbers", numbers=tuple(numbers)),
        changes=tuple(changes),
    )


def unreachable_ttft_ms(seen: Observation) -> float | None:
    """The idle fleet's time to first token, if it exceeds the target and requests miss the target.
    Both the step models and the measured chunks of the prompts must exceed it."""
    found = _alone_ttft_ms(seen)
    return found if found and found > seen.targets.ttft_ms and is_ttft_high(seen) else None


def _alone_ttft_ms(seen: Observation) -> float | None:
    """The idle fleet's time to first token: by its step models, or by the prompts' measured chunks
    if these are shorter."""
    idle = idle_ttft_ms(seen)
    measured = median_or_none(each.first.get("prefill") for each in seen.requests)
    return min(idle, measured) if idle and measured else None


def unreachable_tpot_ms(seen: Observation) -> float | None:
    """The idle fleet's time per output token, if it exceeds the target and requests miss the
    target. Both the step models and the median of the requests must exceed it."""
    idle = idle_tpot_ms(seen)
    measured = median_or_none(each.tpot_ms for each in seen.requests)
    found = min(idle, measured) if idle and measured else None
    return found if found and found > seen.targets.tpot_ms and is_tpot_high(seen) else None


def idle_ttft_ms(seen: Observation) -> float | None:
    """The median prompt's computation on the pool's median worker."""
    prompts = [each for each in seen.requests if each.num_prompt_tokens]
    if not prompts:
        return None
    tokens = median(each.computed_tokens for each in prompts)
    attended = median(_attended(each) for each in prompts)
    pool = serving(seen, Role.PREFILL) or serving(seen, Role.DECODE)
    models = [each.step_model for each in pool]
    return median_or_none(each.predict_ms(tokens, attended) if each else None for each in models)


def idle_tpot_ms(seen: Observation) -> float | None:
    """One sequence of the median length in a step of its own."""
    lengths = [each.num_prompt_tokens + each.num_output_tokens / 2 for each in seen.requests]
    if not lengths:
        return None
    models = [each.step_model for each in serving(seen, Role.DECODE)]
    context = median(lengths)
    return median_or_none(each.predict_ms(1, context) if each else None for each in models)


def _attended(request: RequestFacts) -> float:
    new = request.computed_tokens
    return new * request.cached_tokens + new * (new + 1) / 2


def _raise(setting: str, old: float, reachable: float) -> Change:
    new = round(reachable * 1.5)
    return Change(
        setting=setting,
        scope="router",
        old=f"{old:g}",
        new=f"{new}",
        live=True,
        text="Half more than an idle fleet needs. To keep the target, use faster devices, a "
        "smaller model or weights of fewer bits.",
    )
