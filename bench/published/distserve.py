"""DistServe (Zhong et al., OSDI 2024): goodput of fleets that split, OPT-13B as a chatbot.

Goodput is the highest rate per GPU at which 90 % of the requests have their first token within
250 ms and later ones within 100 ms each. Lengths are log-normal, with the means of ShareGPT.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.published.results import Result, Row
from protocol.messages import Role
from router.routing.decision import decide
from scheduling.scheduler import SchedulerConfig
from simulator.devices.cards import CARDS
from simulator.devices.model_shape import model_shape
from simulator.devices.roofline import Roofline
from simulator.fleet import Fleet, FleetSpec
from simulator.policies.choices import Policy, with_threshold
from simulator.report.summary import Targets
from simulator.requests import Request
from simulator.traces.files import TraceOptions, read_trace
from simulator.traces.sessions import Trace
from simulator.worker_spec import WorkerSpec

_TARGETS, _GOOD_SHARE = Targets(250, 100), 0.9
_REQUESTS, _PROMPT, _OUTPUT = 1000, 756, 200
_BLOCK, _CONTEXT = 16, 2048
_WHOLE_S = 1e3  # decodes make no chunk smaller


@dataclass(frozen=True)
class _Arm:
    """Workers of one GPU each. `itl_s` bounds the chunks beside decodes."""

    prefill: int
    decode: int
    policy: Policy
    itl_s: float

    @property
    def num_gpus(self) -> int:
        return self.prefill + self.decode


def goodput() -> Result:
    """Requests per second and GPU of each kind of fleet. Of the fleets that split, the best one is
    shown."""
    whole = _per_gpu(_Arm(0, 1, decide, _WHOLE_S))
    chunked = _per_gpu(_Arm(0, 1, decide, 0.05))
    splits = {
        (prefill, decode): _per_gpu(_Arm(prefill, decode, with_threshold(0), 0.05))
        for prefill, decode in ((1, 1), (2, 1), (3, 2))
    }
    (prefill, decode), best = max(splits.items(), key=lambda each: each[1])
    baton = max(_per_gpu(_Arm(p, d, decide, 0.05)) for p, d in splits)
    rows = [
        Row("colocated, whole prompts", 1.0, 1.0, f"{whole:.2f} requests/s and GPU"),
        Row("split", 2.0, best / whole, f"{prefill} prefill, {decode} decode: {best:.2f}"),
        Row("colocated, chunked", None, chunked / whole, f"{chunked:.2f}"),
        Row("split, Baton's placement", None, baton / whole, f"{baton:.2f}"),
    ]
    return Result("DistServe: goodput of OPT-13B on A100-80G, chat", "x", rows)


def _per_gpu(arm: _Arm) -> float:
    low, high = 0.1, 40.0
    for _ in range(7):
        middle = (low * high) ** 0.5
        if _passes(arm, middle * arm.num_gpus):
            low = middle
        else:
            high = middle
    return low


def _passes(arm: _Arm, rate: float) -> bool:
    text = f"poisson:rate={rate},requests={_REQUESTS},prompt={_PROMPT},output={_OUTPUT},spread=0.8"
    made = read_trace(text, TraceOptions(seed=1))
    fitting = [
        each
        for each in made.sessions
        if each.turns[0].num_prompt + each.turns[0].num_output <= _CONTEXT
    ]
    trace, num_bad = Trace(made.name, fitting), 0

    def goes_on(request: Request) -> bool:
        nonlocal num_bad
        num_bad += bool(request.failure) or not _TARGETS.are_met(request)
        return num_bad <= (1 - _GOOD_SHARE) * len(fitting)

    return Fleet(_fleet(arm), 0).run(trace, goes_on=goes_on).is_whole


def _fleet(arm: _Arm) -> FleetSpec:
    card, shape = CARDS["A100-80G"], model_shape("OPT-13B")
    times = Roofline(card, shape, 1)
    config = SchedulerConfig(_BLOCK, 256, _BLOCK, _CONTEXT, arm.itl_s)
    num_blocks, block_bytes = times.pool_blocks(_BLOCK), times.kv_bytes_per_token * _BLOCK
    pools = tuple(
        (WorkerSpec(role, config, num_blocks, block_bytes, _CONTEXT, times), count)
        for role, count in ((Role.PREFILL, arm.prefill), (Role.DECODE, arm.decode))
        if count
    )
    return FleetSpec(pools, lambda: arm.policy, card.peer_bytes_per_s)
