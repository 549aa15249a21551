"""SARATHI (Agrawal et al., 2023) and Sarathi-Serve (OSDI 2024): chunks beside decodes.

SARATHI's rule: chunks of C tokens beside B - 1 decodes gain most where prompts are C / (B - 1)
times as long as outputs, because then no step lacks either. Sarathi-Serve: smaller token budgets
keep the time between tokens short.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.published.results import Result, Row
from checkpoint.json_keys import JsonKeys
from protocol.messages import Role
from router.routing.decision import decide
from scheduling.scheduler import SchedulerConfig
from simulator.devices.cards import CARDS
from simulator.devices.model_shape import shape_of
from simulator.devices.roofline import Roofline
from simulator.devices.step_times import ChunkWork
from simulator.fleet import Fleet, FleetSpec, Outcome
from simulator.report.summary import Targets, summarize
from simulator.traces.files import TraceOptions, read_trace
from simulator.traces.sessions import Session, Trace, Turn
from simulator.worker_spec import WorkerSpec

_LLAMA_13B = {
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
    "num_attention_heads": 40, "vocab_size": 32000, "max_position_embeddings": 16384,
}  # fmt: skip
_YI_34B = {
    "hidden_size": 7168, "intermediate_size": 20480, "num_hidden_layers": 60,
    "num_attention_heads": 56, "num_key_value_heads": 8, "vocab_size": 64000,
    "max_position_embeddings": 16384,
}  # fmt: skip
_BLOCK, _NEVER_S = 16, 1e3
_CHUNK, _BATCH, _LENGTH = 256, 18, 1024
_RATIOS = (1, 2, 4, 7, 11, 15, 19, 26, 36, 50, 80)
_BUDGETS = (512, 2048, 16384)


def _run(times: Roofline, num_cards: int, config: SchedulerConfig, trace: Trace) -> Outcome:
    """The trace on one worker that computes its own prompts."""
    spec = WorkerSpec(
        Role.DECODE, config, times.pool_blocks(_BLOCK), times.kv_bytes_per_token * _BLOCK, 16384,
        times, num_cards,
    )  # fmt: skip
    return Fleet(FleetSpec(((spec, 1),), lambda: decide, 1e12), 0).run(trace)


def chunk_rule(ratios: Sequence[int] = _RATIOS, num_batches: int = 12) -> Result:
    """The gain of chunks beside decodes over separate phases, by the ratio of prompt to output."""
    times = Roofline(CARDS["A100-80G"], shape_of(JsonKeys(_LLAMA_13B, "Llama-13B"), "Llama-13B"), 1)
    config = SchedulerConfig(_BLOCK, _BATCH, _CHUNK, _CHUNK, _NEVER_S)
    best = _CHUNK / (_BATCH - 1)
    rows = []
    for ratio in ratios:
        output = max(2, round(_LENGTH / (1 + ratio)))
        prompt = _LENGTH - output
        count = num_batches * _BATCH
        sessions = [Session(f"r{n}", 0.0, (Turn(0.0, prompt, output),)) for n in range(count)]
        took = _run(times, 1, config, Trace("r", sessions)).duration_s
        rows.append((ratio, count / _BATCH * _apart_s(times, prompt, output) / took))
    peak = max(rows, key=lambda each: each[1])[0]
    shown = [Row(f"prompt {ratio} times the output", None, gain) for ratio, gain in rows]
    shown.append(Row("ratio of the greatest gain", best, float(peak), "the rule: C / (B - 1)"))
    return Result(f"SARATHI: gain of chunks of {_CHUNK} beside {_BATCH - 1} decodes", "", shown)


def _apart_s(times: Roofline, prompt: int, output: int) -> float:
    """A batch whose prompts are computed whole, one by one, before all decode together."""
    whole = times.seconds(0, 0, ChunkWork(prompt, prompt * (prompt + 1) // 2, prompt, 1))
    fixed, slope = times.decode_line(_BATCH)
    steps = output - 1
    contexts = _BATCH * (steps * prompt + steps * (steps + 1) // 2)
    return _BATCH * whole + steps * fixed + slope * contexts


def token_budget() -> Result:
    """The 99th percentile of the time between tokens at each budget, Yi-34B on two A100, prompts as
    long as summaries of papers need. Published are the limits for which the paper uses a budget."""
    times = Roofline(CARDS["A100-80G"], shape_of(JsonKeys(_YI_34B, "Yi-34B"), "Yi-34B"), 2)
    text = "poisson:rate=0.35,requests=1000,prompt=7000,output=210,spread=0.4"
    trace = read_trace(text, TraceOptions(seed=1))
    rows = []
    for budget in _BUDGETS:
        config = SchedulerConfig(_BLOCK, 128, min(budget, 512), budget, _NEVER_S)
        summary = summarize("", _run(times, 2, config, trace), Targets(1e9, 1e9))
        assert summary.itl_ms is not None
        assert summary.ttft_ms is not None
        theirs = {512: 0.2, 2048: 1.0}.get(budget)
        note = f"median TTFT {summary.ttft_ms.p50 / 1e3:.2f} s"
        rows.append(Row(f"{budget:,} tokens", theirs, summary.itl_ms.p99 / 1e3, note))
    return Result("Sarathi-Serve: p99 time between tokens by token budget", " s", rows)
