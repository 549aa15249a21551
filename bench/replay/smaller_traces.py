"""Traces with less in each request, for systems that are smaller than those recorded."""

from __future__ import annotations

from dataclasses import replace

from protocol.errors import ConfigError
from simulator.traces.sessions import Session, Trace


def shrunk(trace: Trace, divisor: int) -> Trace:
    """The same traffic with that much shorter prompts and outputs. Raises ConfigError if it does
    not divide the recorded blocks."""
    size = trace.block_tokens
    if divisor < 1 or (size is not None and size % divisor):
        raise ConfigError(f"--shrink {divisor}: it must divide the trace's blocks of {size} tokens")
    return Trace(trace.name, [_shrunk(each, divisor) for each in trace.sessions])


def _shrunk(session: Session, divisor: int) -> Session:
    turns = []
    for turn in session.turns:
        blocks = turn.blocks
        if blocks is not None:
            blocks = replace(blocks, block_tokens=blocks.block_tokens // divisor)
        turns.append(
            replace(
                turn,
                num_prompt=-(-turn.num_prompt // divisor),
                num_output=-(-turn.num_output // divisor),
                blocks=blocks,
                starts=tuple(_shrunk(each, divisor) for each in turn.starts),
            )
        )
    return replace(session, turns=tuple(turns))
