"""Recorded sessions of coding agents: one JSON object a session, with ids of 64-token blocks.

A turn starts after the end of the one before and a recorded pause. Entries without tokens start a
sub-agent, a session of its own beside the one that started it. The blocks of an output are those
that follow this turn's prompt in the next turn's prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from simulator.traces.lines import TraceLine
from simulator.traces.sessions import BlockRuns, Session, Turn, with_output

BLOCK_TOKENS = 64


def sessions(lines: Iterable[TraceLine], span_s: float, rng: random.Random) -> Iterator[Session]:
    """The sessions, beginning at random times within `span_s`."""
    found = [
        _session(line, line.text("id"), rng.random() * span_s, number)
        for number, line in enumerate(lines)
    ]
    yield from sorted(found, key=lambda each: each.start_s)


def _session(line: TraceLine, name: str, start_s: float, space: int) -> Session:
    return Session(name, start_s, _turns(line.lines("requests"), name, space))


def _turns(lines: list[TraceLine], name: str, space: int) -> tuple[Turn, ...]:
    starts: dict[int, list[Session]] = {}
    computing: list[TraceLine] = []
    ended = 0.0
    for number, line in enumerate(lines):
        at = line.number("t_s", 0.0)
        if "in" in line:
            computing.append(line)
            ended = at + line.number("api_s", 0.0)
        if "subagent" in line:
            turns = _turns(line.lines("subagent"), f"{name}.{number}", space)
            child = Session(f"{name}.{number}", max(0.0, at - ended), turns)
            starts.setdefault(max(0, len(computing) - 1), []).append(child)
    runs = [line.runs("blocks") for line in computing]
    return tuple(
        Turn(
            line.number("think_s", 0.0),
            line.integer("in"),
            max(1, line.integer("out", minimum=0)),
            BlockRuns(
                space,
                BLOCK_TOKENS,
                with_output(runs[index], runs[index + 1] if index + 1 < len(runs) else ()),
            ),
            tuple(starts.get(index, ())),
        )
        for index, line in enumerate(computing)
    )
