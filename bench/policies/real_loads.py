"""Loads for real fleets: the same lengths and times in every turn of a pair.

Each turn has a cache salt of its own, so no turn finds the blocks of an earlier one in a cache.
Knows HTTP endpoints, no fleets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from bench.hot_prefix import Load as HotPrefix
from bench.hot_prefix import send
from bench.replay.player import Manner, Player
from bench.replay.vocabulary import Target, learn_vocabulary
from bench.tools.stream_load import StreamClient, StreamLoad
from protocol.errors import BatonError
from simulator.traces.sessions import Session, Trace, Turn

_WARM_UP_S = 1.0
_MOST_PAUSE_S = 2.0


class Sample(NamedTuple):
    """What a load saw of one router: times to first tokens, and between tokens, in seconds."""

    ttft_s: list[float]
    gaps_s: list[float]


Load = Callable[[str, int, str], Sample]
"""Sends the load of a pair, by its number, to a router's URL under a cache salt. Raises
BatonError if a request fails."""


def hot_prefix(load: HotPrefix) -> Load:
    """Requests that share their prefix; the first one comes before the others."""

    def play(url: str, pair: int, salt: str) -> Sample:
        salted = replace(load, cache_salt=salt)
        warm, *prompts = salted.prompts()
        asyncio.run(send(url, salted, [warm], 0.0))
        times = asyncio.run(send(url, salted, prompts, load.seconds))
        gaps = [after - at for _, *each in times for at, after in pairwise(each)]
        return Sample([first - sent for sent, first, *_ in times], gaps)

    return play


def interference(load: StreamLoad, seconds: float) -> Load:
    """Streams that decode all the time, with long prompts among them."""

    def play(url: str, pair: int, salt: str) -> Sample:
        salted = replace(load, seed=load.seed + pair, cache_salt=salt)
        _, phase = asyncio.run(StreamClient(url, salted).run(_WARM_UP_S, 0.0, seconds))
        return Sample(phase.ttft_s, phase.gaps_s)

    return play


@dataclass(frozen=True)
class AgentOptions:
    """Which part of recorded sessions is sent: `sessions` at a time, each until its first turn
    beyond the model's `context` or `most_turns`. They begin within `span_s`. Pauses are divided by
    `pace` and last two seconds at most."""

    sessions: int
    context: int
    most_turns: int
    span_s: float
    pace: float


def agents(trace: Trace, options: AgentOptions) -> Load:
    """Sessions of agents, other ones in each pair. The trace's lengths are already scaled."""
    cuts = [cut(each, options) for each in trace.sessions]
    fitting = [each for each in cuts if each is not None]
    size = options.sessions
    if len(fitting) < size:
        raise BatonError(f"only {len(fitting)} of the sessions fit into {options.context} tokens")
    num_groups = len(fitting) // size

    def play(url: str, pair: int, salt: str) -> Sample:
        first = pair % num_groups * size
        chosen = [
            replace(each, start_s=options.span_s * number / size)
            for number, each in enumerate(fitting[first : first + size])
        ]
        target = Target(url, Target(url, "").ask("/v1/models")["data"][0]["id"])
        manner = Manner(learn_vocabulary(target), as_text=False, cache_salt=salt)
        played = asyncio.run(Player(target, manner).play(Trace(trace.name, chosen)))
        for each in played:
            if each.error:
                raise BatonError(f"{each.session}, turn {each.turn}: {each.error}")
        return Sample([each.ttft_s for each in played], [g for each in played for g in each.gaps_s])

    return play


def cut(session: Session, options: AgentOptions) -> Session | None:
    """The session as it is sent, with its sub-agents; None if not even its first turn fits."""
    turns: list[Turn] = []
    for turn in session.turns[: options.most_turns]:
        if turn.num_prompt + turn.num_output > options.context:
            break
        starts = [cut(each, options) for each in turn.starts]
        pause_s = min(_MOST_PAUSE_S, turn.pause_s / options.pace)
        kept = tuple(each for each in starts if each is not None)
        turns.append(replace(turn, pause_s=pause_s, starts=kept))
    start_s = min(_MOST_PAUSE_S, session.start_s / options.pace)
    return replace(session, start_s=start_s, turns=tuple(turns)) if turns else None
