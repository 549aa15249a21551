"""Sessions of turns: a turn starts after the end of the one before and a pause.

Traffic without sessions is one session of one turn for each request, so it arrives at its recorded
times whatever the fleet does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from process.number_text import count as counted
from process.number_text import significant

_ID_BITS = 44

Runs = tuple[tuple[int, int], ...]
"""Consecutive ids as pairs `(first id, count)`."""


def runs_of(ids: Iterable[int]) -> Runs:
    """The ids as runs."""
    runs: list[tuple[int, int]] = []
    for each in ids:
        if runs and each == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((each, 1))
    return tuple(runs)


def with_output(own: Runs, following: Runs) -> Runs:
    """The blocks of a prompt and its output: those of the next prompt, if it continues this one."""
    if not own or len(following) < len(own) or following[: len(own) - 1] != own[:-1]:
        return own
    first, count = following[len(own) - 1]
    return following if first == own[-1][0] and count >= own[-1][1] else own


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """Which blocks a prompt consists of: runs `(first id, count)` of blocks of `block_tokens`
    tokens. Equal ids of one `space` mean equal contents behind equal contents."""

    space: int
    block_tokens: int
    runs: Runs

    def digests(self, block_size: int) -> list[bytes]:
        """The digests of blocks of `block_size` tokens, a divisor or a multiple of
        `block_tokens`."""
        each = self.block_tokens // block_size
        base = self.space << _ID_BITS
        found: list[bytes] = []
        if not each:  # a longer block is known by the last recorded one in it
            size = block_size // self.block_tokens
            ids = (base + n for first, count in self.runs for n in range(first, first + count))
            raw = array("Q", islice(ids, size - 1, None, size)).tobytes()
            return [raw[at : at + 8] for at in range(0, len(raw), 8)]
        for first, count in self.runs:
            start = base + first * each
            raw = array("Q", range(start, start + count * each)).tobytes()
            found += [raw[at : at + 8] for at in range(0, len(raw), 8)]
        return found


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, `pause_s` after the end of the turn before, and not earlier than
    `not_before_s` after the session's start. `blocks` covers its prompt and, where they are known,
    the blocks of its output. `starts` are sessions that begin when the turn ends, each after its
    `start_s`."""

    pause_s: float
    num_prompt: int
    num_output: int
    blocks: BlockRuns | None = None
    starts: tuple[Session, ...] = ()
    not_before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """Turns one after the other, the first one's pause counting from `start_s`; `share` is the
    owner's, and a higher `priority` more urgent."""

    name: str
    start_s: float
    turns: Sequence[Turn]
    share: str = ""
    priority: int = 0


@dataclass(frozen=True)
class Trace:
    """Traffic in the order of its starts, with a name for people."""

    name: str
    sessions: Sequence[Session]

    def faster(self, factor: float) -> Trace:
        """The same traffic, with the time between arrivals divided by `factor`."""
        return Trace(self.name, [_faster(each, factor) for each in self.sessions])

    @property
    def title(self) -> str:
        """Its name and size in words."""
        starts = [each.start_s for each in self.sessions] or [0.0]
        span_s = max(starts) - min(starts)
        size, within = counted(self.num_turns, "request"), f"within {significant(span_s)} s"
        if self.num_turns == len(self.sessions):
            return f"{self.name} ({size}, arrivals {within})"
        sessions = counted(len(self.sessions), "session")
        return f"{self.name} ({size} in {sessions}, beginning {within})"

    @property
    def num_turns(self) -> int:
        """Requests of all sessions."""
        return sum(_num_turns(each) for each in self.sessions)

    @property
    def block_tokens(self) -> int | None:
        """The size of the recorded blocks; None if none are recorded."""
        for session in self.sessions:
            for turn in session.turns:
                if turn.blocks is not None:
                    return turn.blocks.block_tokens
        return None


def _faster(session: Session, factor: float) -> Session:
    turns = session.turns
    if any(each.not_before_s for each in turns):
        turns = tuple(replace(each, not_before_s=each.not_before_s / factor) for each in turns)
    return replace(session, start_s=session.start_s / factor, turns=turns)


def _num_turns(session: Session) -> int:
    return len(session.turns) + sum(_num_turns(e) for turn in session.turns for e in turn.starts)
