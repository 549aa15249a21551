"""One planned step: the sequences that decode and the prompt chunks to compute.

Pure data, torch-free. The scheduler makes batches; the engine runs them and accounts for them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import field

from protocol.messages import FinishReason
from scheduling.sequence import Sequence
from scheduling.step_model import StepCost, attended_pairs


class Chunk(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of a sequence from `start`; `completes` marks a prompt's last chunk."""

    sequence: Sequence
    start: int
    num_tokens: int
    completes: bool


class Batch(msgspec.Struct, frozen=True):
    """One step. Sequences in `received` get all their blocks from a peer and compute nothing here.
    Those in `fetching` get their leading blocks first and are computed in later steps. Those in
    `held` are running, but this step and later ones leave them out until they have a mask."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    received: list[Sequence] = field(default_factory=list)
    expired: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)
    fetching: list[Sequence] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the step has nothing to compute."""
        return not self.decodes and not self.chunks

    @property
    def num_chunk_tokens(self) -> int:
        """Prompt tokens to compute."""
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences with tokens to compute in this step."""
        return self.decodes + [chunk.sequence for chunk in self.chunks]

    def split(self) -> list[Batch]:
        """The same computation as one batch per sequence."""
        decodes = [Batch(decodes=[sequence]) for sequence in self.decodes]
        return decodes + [Batch(chunks=[chunk]) for chunk in self.chunks]

    def without(self, sequences: Iterable[Sequence]) -> Batch:
        """This step without the given sequences."""
        left_out = set(sequences)
        if not left_out:
            return self
        return msgspec.structs.replace(
            self,
            decodes=[sequence for sequence in self.decodes if sequence not in left_out],
            chunks=[chunk for chunk in self.chunks if chunk.sequence not in left_out],
        )

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences that get a token from this step, in the order of the logits' rows."""
        return self.decodes + [chunk.sequence for chunk in self.chunks if chunk.completes]

    @property
    def promised(self) -> list[tuple[Sequence, int]]:
        """The sequences of `sampled`, each with the number of tokens to compute."""
        decodes = [(sequence, 1) for sequence in self.decodes]
        return decodes + [(c.sequence, c.num_tokens) for c in self.chunks if c.completes]

    @property
    def incomplete(self) -> list[Chunk]:
        """Chunks that do not complete their prompts: they give no token."""
        return [chunk for chunk in self.chunks if not chunk.completes]

    @property
    def cost(self) -> StepCost:
        """The step's cost, as input for the step model."""
        num_tokens = attended = len(self.decodes)
        for each in self.decodes:
            attended += each.num_computed + each.num_ahead
        for chunk in self.chunks:
            num_tokens += chunk.num_tokens
            attended += attended_pairs(chunk.num_tokens, chunk.start)
        return StepCost(num_tokens, attended)


class Produced(msgspec.Struct, frozen=True, gc=False):
    """A token that a step added to a sequence, and whether it ends the sequence."""

    sequence: Sequence
    index: int
    token_id: int
    finish: FinishReason | None
