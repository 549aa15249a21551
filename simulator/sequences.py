"""Sequences without token ids: only their number counts, and which blocks repeat.

A simulated prompt is its length and the digests of its blocks, as recorded traffic has them. Blocks
beyond the known ones are shared with nobody, so they have no digest.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf
from typing import cast

from protocol.messages import FinishReason
from protocol.sampling import SamplingParams
from scheduling.sequence import Sequence


@dataclass(eq=False, slots=True)
class SimulatedSequence(Sequence):
    """A sequence whose `tokens` are only counted; `content` has the digests of its blocks, those of
    its output included where they are known."""

    content: Seq[bytes] = ()

    def extend_hashes(self) -> None:
        """See `Sequence`."""
        if not self.content:
            return
        known = len(self.hashes)
        full = len(self.tokens) // self.block_size
        if known < full and known < len(self.content):
            self.hashes.extend(self.content[known:full])

    def append(self, token_id: int) -> FinishReason | None:
        """See `Sequence`."""
        return self.extend(1)

    def extend(self, count: int) -> FinishReason | None:
        """Add `count` output tokens, of which only the last may end the output."""
        num_tokens = len(self.tokens) + count
        self.tokens = counted(num_tokens)
        if self.content:
            self.extend_hashes()
        is_over = num_tokens - self.num_prompt >= self.sampling.max_tokens
        return FinishReason.LENGTH if is_over else None


def counted(count: int) -> list[int]:
    """`count` tokens, of which only the number is known; takes no memory."""
    return cast("list[int]", range(count))


def simulated_sequence(
    request_id: str,
    num_prompt: int,
    num_output: int,
    content: Seq[bytes],
    block_size: int,
    arrival: float,
) -> SimulatedSequence:
    """A sequence of which nothing is computed yet, and whose output will have exactly `num_output`
    tokens."""
    return SimulatedSequence(
        request_id=request_id,
        attempt=0,
        tokens=counted(num_prompt),
        num_prompt=num_prompt,
        sampling=_sampling(num_output),
        root_hash=b"",
        block_size=block_size,
        arrival=arrival,
        deadline=inf,
        content=content,
    )


_SAMPLING: dict[int, SamplingParams] = {}


def _sampling(max_tokens: int) -> SamplingParams:
    found = _SAMPLING.get(max_tokens)
    if found is None:
        found = _SAMPLING[max_tokens] = SamplingParams(
            max_tokens=max_tokens, seed=0, temperature=0.0
        )
    return found
