"""The traffic of a comparison: single prompts and groups, by which a fleet is measured, and kinds
of loads, as dense as that fleet allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.simulated_against_real.fleets import BLOCK_TOKENS
from simulator.devices.measured_steps import TabledSteps, table_value
from simulator.traces.files import TraceOptions, read_trace
from simulator.traces.sessions import Session, Trace, Turn

_PROMPT, _OUTPUT = 160, 32
_LONE_PROMPTS, _REPEATS, _PAUSE_S = (16, 32, 64, 128, 256, 512), 8, 0.03
_AT_ONCE = (2, 4, 8, 16, 32)
_SHORT_PROMPT, _LONG_PROMPT, _GROUP_OUTPUT = 24, 400, 40
LONGEST_SHORT = _SHORT_PROMPT + _GROUP_OUTPUT
"""The longest context of the groups with short prompts."""
_MOST_BESIDE = 0.3
"""Cores' worth of router and client, which share the workers' cores: with more of them, the steps
that were timed would not be those of the load."""


@dataclass(frozen=True)
class Load:
    """A kind of traffic, and its load as a share of the capacity of two workers."""

    name: str
    share: float
    text: str
    seed: int = 11

    def parts(self, count: int) -> list[Load]:
        """Loads of the same kind and density that have no request in common."""
        return [
            replace(self, name=f"{self.name} {number}", seed=self.seed + 1000 * number)
            for number in range(1, count + 1)
        ]


_POISSON = "poisson:rate={rate},requests={count},prompt={prompt},output={output}"
LOADS = (
    Load("light", 0.25, _POISSON),
    Load("busy", 0.5, _POISSON),
    Load(
        "talks",
        0.4,
        "turns:rate={rate},requests={count},prompt={third},output={output},turns=3,pause=0.5,"
        "shared=64",
    ),
)
MIXTURE = Load("mixture", 0.4, _POISSON, seed=5)
"""The load by which the calibration measures delays, and the factors of steps. Its density becomes
that of the compared load."""


@dataclass(frozen=True)
class Costs:
    """The times that limit a load: steps, and the CPU time that router and client take for a
    request and for an output token."""

    times: TabledSteps
    request_cpu_s: float
    token_cpu_s: float


def calibration_traces(context: int) -> list[Trace]:
    """Single prompts of growing length; then groups of requests at once, the last ones with long
    prompts."""
    longest = context - _GROUP_OUTPUT - 1
    lengths = [each for each in _LONE_PROMPTS if each < longest]
    lengths.append(min(longest, 900))
    lone = [Turn(_PAUSE_S, each, 4) for each in lengths for _ in range(_REPEATS)]
    traces = [Trace("lone", [Session("lone", 0.0, tuple(lone))])]
    groups = [(each, _SHORT_PROMPT) for each in _AT_ONCE]
    groups += [(each, min(longest, _LONG_PROMPT)) for each in (2, 4, 8)]
    for count, prompt in groups:
        name, turn = f"group {count}x{prompt}", Turn(0.0, prompt, _GROUP_OUTPUT)
        traces.append(Trace(name, [Session(f"{name} {n}", 0.0, (turn,)) for n in range(count)]))
    return traces


def load_trace(load: Load, costs: Costs, context: int, seconds: float) -> Trace:
    """The traffic of a load that takes about so long, as dense as the fleet allows. No load repeats
    the prompts or blocks of another one, which workers still have in their caches."""
    prompt, output = min(_PROMPT, context // 6), min(_OUTPUT, context // 16)
    times = costs.times
    alone = table_value(times.chunks, prompt) + output * table_value(times.decodes, 4) / 4
    beside_s = costs.request_cpu_s + output * costs.token_cpu_s
    rate = load.share * min(2 / alone, _MOST_BESIDE / max(beside_s, 1e-6))
    text = load.text.format(
        rate=rate,
        count=max(10, round(rate * seconds)),
        prompt=prompt,
        third=max(16, prompt // 3),
        output=output,
    )
    trace = read_trace(text, TraceOptions(seed=load.seed, block_tokens=BLOCK_TOKENS))
    sessions = [
        replace(
            each,
            name=f"{load.name} {each.name}",
            turns=tuple(_in_space(load.seed, turn) for turn in each.turns),
        )
        for each in trace.sessions
        if _fits(each.turns, context)
    ]
    return Trace(load.name, sessions)


def _in_space(space: int, turn: Turn) -> Turn:
    """The turn with blocks of which none is a block of another space."""
    return turn if turn.blocks is None else replace(turn, blocks=replace(turn.blocks, space=space))


def _fits(turns: Sequence[Turn], context: int) -> bool:
    return all(turn.num_prompt + turn.num_output <= context for turn in turns)
