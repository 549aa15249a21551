"""What each turn computed, and why: pure arithmetic on the ids of prompts and answers.

Of a turn's prompt, the new tokens have to be computed. Tokens of the history are computed again for
three reasons: their block was not full, rendering gave them other ids, or the service chose to
compute them. An answer's last token was never computed, so each turn computes it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class TurnResult:
    """One answered request: the ids of its prompt and answer, how many of the prompt's tokens were
    cached, and the time to the first token."""

    conversation: str
    number: int
    prompt: Sequence[int]
    answer: Sequence[int]
    cached_tokens: int
    ttft_ms: float


@dataclass(frozen=True)
class Computed:
    """Tokens that were computed, by reason."""

    new: int = 0
    block: int = 0
    rendering: int = 0
    chosen: int = 0

    def __add__(self, other: Computed) -> Computed:
        names = [each.name for each in fields(self)]
        return Computed(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def total(self) -> int:
        """All tokens that were computed."""
        return self.new + self.block + self.rendering + self.chosen


def new_tokens(before: TurnResult | None, turn: TurnResult, is_cut: bool) -> int:
    """The tokens of a prompt beyond its history. If the history was cut, those that differ."""
    if before is None:
        return len(turn.prompt)
    history = [*before.prompt, *before.answer]
    known = shared_tokens(history, turn.prompt) if is_cut else len(history)
    return max(0, len(turn.prompt) - known)


def computed(
    before: TurnResult | None, turn: TurnResult, block_size: int, is_cut: bool = False
) -> Computed:
    """What a turn computed, given the turn before it."""
    num_computed = len(turn.prompt) - turn.cached_tokens
    num_new = new_tokens(before, turn, is_cut)
    new = min(num_computed, num_new)
    rendering = 0
    if before is not None:
        shared = shared_tokens([*before.prompt, *before.answer], turn.prompt)
        rendering = min(num_computed - new, len(turn.prompt) - shared - num_new)
    rest = num_computed - new - rendering
    block = min(rest, block_size)
    return Computed(new, block, rendering, rest - block)


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences share at their beginnings."""
    shared = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        shared += 1
    return shared


@dataclass(frozen=True)
class Account:
    """A contestant's figures over all conversations."""

    computed: Computed
    num_new: int
    ttft_ms: dict[tuple[str, int], float]

    @property
    def per_new(self) -> float:
        """Computed tokens for each new one."""
        return self.computed.total / max(1, self.num_new)

    @property
    def p50(self) -> float:
        """The median TTFT from the second turn on, in ms."""
        return statistics.median(self.ttft_ms.values())

    @property
    def p95(self) -> float:
        """The 95th percentile of the time to first token."""
        return sorted(self.ttft_ms.values())[int(0.95 * (len(self.ttft_ms) - 1))]

    def ratio_to(self, other: Account) -> float:
        """The median over all turns of the ratio of the two TTFTs."""
        both = self.ttft_ms.keys() & other.ttft_ms.keys()
        return statistics.median(self.ttft_ms[key] / other.ttft_ms[key] for key in both)


def account(turns: Iterable[TurnResult], cuts: set[tuple[str, int]], block_size: int) -> Account:
    """The figures of one contestant, from its turns in order. `cuts` are the turns before which
    the history was cut."""
    total, num_new = Computed(), 0
    ttft_ms: dict[tuple[str, int], float] = {}
    before: dict[str, TurnResult] = {}
    for turn in turns:
        key = (turn.conversation, turn.number)
        earlier = before.get(turn.conversation)
        total += computed(earlier, turn, block_size, key in cuts)
        num_new += new_tokens(earlier, turn, key in cuts)
        if turn.number:
            ttft_ms[key] = turn.ttft_ms
        before[turn.conversation] = turn
    return Account(total, num_new, ttft_ms)
