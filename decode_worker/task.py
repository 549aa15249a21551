"""One attempt on a decode worker: who asked, what it waits for, and the trace it leaves."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.sequence import Sequence, SequenceState
from kv_transfer.handoff import HandoffKey
from protocol.messages import (
    ChunkSpan,
    DecodeTrace,
    FinishReason,
    HandoffToken,
    PrefillPeer,
    SequenceTokens,
)
from protocol.sampling import TokenLogprobs
from runtime.control import Peer


@dataclass(eq=False)
class Task:
    """An attempt from its Generate message until its last token.

    A remote one joins the batch when it has both its `token` and all its blocks. Times are
    microseconds of the Unix epoch, 0 while something has not happened.
    """

    router: Peer
    sequence: Sequence
    prefill: PrefillPeer | None
    received_us: int
    token: HandoffToken | None = None
    admitted_us: int = 0
    granted_blocks: int = 0
    blocks_arrived_us: int = 0
    first_token_us: int = 0
    first_step_us: int = 0
    num_decode_steps: int = 0
    chunks: list[ChunkSpan] = field(default_factory=list)

    @property
    def key(self) -> HandoffKey:
        """The handoff's name, too."""
        return HandoffKey(*self.sequence.key)

    def waits_for_token_of(self, incarnation: str) -> bool:
        """Whether the first token is to come from this prefill worker, and has not."""
        return (
            self.token is None
            and self.sequence.state is SequenceState.RECEIVING
            and self.prefill is not None
            and self.prefill.incarnation == incarnation
        )

    def tokens(
        self,
        index: int,
        token_id: int,
        logprobs: TokenLogprobs | None,
        finish: FinishReason | None,
        trace: DecodeTrace | None,
    ) -> SequenceTokens:
        """One token for the router."""
        return SequenceTokens(
            request_id=self.sequence.request_id,
            attempt=self.sequence.attempt,
            index=index,
            token_ids=[token_id],
            logprobs=None if logprobs is None else [logprobs],
            finish=finish,
            trace=trace,
        )

    def trace(self, worker_id: str, finished_us: int) -> DecodeTrace:
        """Where the time went."""
        return DecodeTrace(
            worker_id=worker_id,
            received_us=self.received_us,
            admitted_us=self.admitted_us,
            granted_blocks=self.granted_blocks,
            cached_tokens=self.sequence.num_cached,
            chunks=tuple(self.chunks),
            blocks_arrived_us=self.blocks_arrived_us,
            first_token_us=self.first_token_us,
            first_step_us=self.first_step_us,
            finished_us=finished_us,
            num_decode_steps=self.num_decode_steps,
            num_preemptions=self.sequence.num_preemptions,
        )
