"""The tokens of a step in parts, so that the event loop can do other work between two of them."""

from __future__ import annotations

from collections.abc import Iterator

from protocol.messages import SequenceTokens, StepTokens

PART_WORK = 64
"""Tokens that are taken at once; a step may bring those of hundreds of sequences."""
LOGPROBS_WORK = 16
"""A token with log-probabilities counts as this many."""


def in_parts(message: StepTokens) -> Iterator[StepTokens]:
    """The same tokens, divided into messages of whole sequences that are each quick to process."""
    part: list[SequenceTokens] = []
    work = 0
    for sequence in message.sequences:
        part.append(sequence)
        work += len(sequence.token_ids) * (1 if sequence.logprobs is None else LOGPROBS_WORK)
        if work >= PART_WORK:
            yield StepTokens(sequences=part)
            part, work = [], 0
    if part:
        yield StepTokens(sequences=part)
