"""Whether to fetch leading blocks of a prompt from a worker that holds them, or to compute them.

Pure. Compares the time that the step model expects for computing with the time that the pair of
workers needs to move the blocks. The worker that computes the prompt decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduling.step_model import attended_pairs

MIN_BLOCKS = 2
ADVANTAGE = 1.25
"""Computing must take longer than fetching by this factor, and by `SLACK_S`."""
SLACK_S = 0.002
OTHERS_WAIT = 2.0
"""The factor by which computing counts more while other requests wait here, because they use the
saved steps."""


@dataclass(frozen=True)
class ComputeCost:
    """How long this worker computes: the step model's coefficients and its largest chunk."""

    fixed_s: float
    per_token_s: float
    per_attended_s: float
    chunk_tokens: int

    def seconds(self, num_tokens: int, context: int) -> float:
        """The time to compute `num_tokens` tokens after `context` ones."""
        pairs = attended_pairs(num_tokens, context)
        steps = math.ceil(num_tokens / self.chunk_tokens)
        return self.per_token_s * num_tokens + self.per_attended_s * pairs + self.fixed_s * steps


@dataclass(frozen=True)
class PairCost:
    """How fast a holder's blocks come here.

    `turn_s` is the time until the holder writes, `connect_s` what a missing connection adds, and
    `found_share` the share of promised blocks that the holder really had.
    """

    turn_s: float
    bytes_per_s: float
    found_share: float = 1.0
    connect_s: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """The time to fetch this many bytes, including those already under way before them."""
        return self.turn_s + self.connect_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Run:
    """`num_blocks` blocks of a prompt, from `first_block` on, and the size of each. `window_bytes`
    come in addition: what the windows of other layers reach back from the end."""

    num_blocks: int
    first_block: int
    block_size: int
    block_bytes: int
    window_bytes: int = 0


@dataclass(frozen=True)
class FetchChoice:
    """The decision about `num_blocks` blocks, with the two times that were compared."""

    num_blocks: int
    compute_s: float
    fetch_s: float
    pays: bool

    @property
    def deadline_s(self) -> float:
        """How long the fetch may take before the sink is content with the blocks that have
        arrived."""
        return min(3 * self.fetch_s + 0.05, self.compute_s + 0.5)


def weigh_fetch(
    run: Run,
    num_under_way: int,
    compute: ComputeCost,
    pair: PairCost,
    others_wait: bool = False,
) -> FetchChoice:
    """Compare fetching these blocks, after `num_under_way` others on the same link, with computing
    them."""
    size, num_blocks = run.block_size, run.num_blocks
    compute_s = compute.seconds(num_blocks * size, run.first_block * size)
    num_bytes = (num_under_way + num_blocks) * run.block_bytes + run.window_bytes
    fetch_s = pair.seconds(num_bytes)
    gain_s = pair.found_share * compute_s * (OTHERS_WAIT if others_wait else 1.0)
    pays = num_blocks >= MIN_BLOCKS and gain_s > ADVANTAGE * fetch_s + SLACK_S
    return FetchChoice(num_blocks, compute_s, fetch_s, pays)
