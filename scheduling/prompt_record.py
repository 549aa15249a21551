"""Log-probabilities of a prompt's own tokens, collected chunk by chunk.

Torch-free, and packed in the wire format: a prompt of 100,000 tokens with 20 alternatives each
takes 17 MB, where its logits would take gigabytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.sampling import PromptLogprobs


@dataclass(frozen=True)
class PromptRows:
    """Consecutive tokens of a prompt: fp32 and int32, little-endian, as in PromptLogprobs."""

    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes


class PromptRecord:
    """The rows of one prompt so far, with `num_top` alternatives each."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._logprobs = bytearray()
        self._ranks = bytearray()
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()

    def put(self, start: int, rows: PromptRows) -> None:
        """Add the rows of the positions from `start` on.

        Replaces the rows of these positions and drops those of later ones, because a preempted
        prompt starts over and a failed step runs again.
        """
        assert len(self._logprobs) >= 4 * start, "a chunk is missing"
        for known, fresh, width in (
            (self._logprobs, rows.logprobs, 4),
            (self._ranks, rows.ranks, 4),
            (self._top_ids, rows.top_ids, 4 * self._num_top),
            (self._top_logprobs, rows.top_logprobs, 4 * self._num_top),
        ):
            del known[width * start :]
            known += fresh

    def whole(self) -> PromptLogprobs:
        """All rows, in the wire format."""
        return PromptLogprobs(
            self._num_top,
            bytes(self._logprobs),
            bytes(self._ranks),
            bytes(self._top_ids),
            bytes(self._top_logprobs),
        )
