"""One attempt on a prefill worker: its router, its progress and its trace."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.handoff_messages import HandoffToken
from protocol.messages import FirstToken
from protocol.sampling import TokenLogprobs
from protocol.traces import GAP_US, ChunkSpan, GapSpan, PrefillTrace, WriteSpan
from scheduling.batch import Produced
from worker.inbound.holders import fetch_spans
from worker.tasks import Task


@dataclass(eq=False)
class PrefillTask(Task):
    """An attempt from its Prefill message until its blocks are released. It ends with its first
    token.

    - `num_ready` of its blocks and `num_stored` of its chunks were offered; a card may still be
      computing the last of them.
    - `chunks` have run; `token` is known once the last chunk has run.
    - `answered`: the sink was told that the handoff ended; `error` says why if it failed.
    - `unwanted`: the router aborted the attempt.
    - `is_hopeless`: the attempt would fail on any worker; `lacks_room`: it fits only on other
      workers.
    """

    token: HandoffToken | None = None
    answered: bool = False
    unwanted: bool = False
    is_hopeless: bool = False
    lacks_room: bool = False
    code: str = ""
    error: str = ""
    scheduled_us: int = 0
    num_ready: int = 0
    num_stored: int = 0
    waits: list[GapSpan] = field(default_factory=list)
    last_step: int = 0
    writes: list[WriteSpan] = field(default_factory=list)
    bytes_moved: int = 0

    def note_chunk(self, span: ChunkSpan, step: int) -> None:
        """Record a chunk that was computed here, in step number `step`."""
        if self.chunks and span.start_us - self.chunks[-1].end_us > GAP_US:
            others = step - self.last_step - 1
            reason = f"{others} steps of other prompts" if others else "the worker ran no step"
            self.waits.append(GapSpan(self.chunks[-1].end_us, span.start_us, reason))
        super().note_chunk(span, step)
        self.last_step = step

    def first_token(self, token: HandoffToken, trace: PrefillTrace) -> FirstToken:
        """The message that carries the first token to the router."""
        return FirstToken(
            request_id=token.request_id,
            attempt=token.attempt,
            index=token.index,
            token_id=token.token_id,
            logprobs=token.logprobs,
            prompt_logprobs=token.prompt_logprobs,
            finish=token.finish,
            trace=trace,
        )

    def handoff_token(self, produced: Produced, logprobs: TokenLogprobs | None) -> HandoffToken:
        """The message that carries the first token to the sink."""
        return HandoffToken(
            request_id=self.sequence.request_id,
            attempt=self.sequence.attempt,
            index=produced.index,
            token_id=produced.token_id,
            logprobs=logprobs,
            prompt_logprobs=self.sequence.take_prompt_logprobs(),
            finish=produced.finish,
            cached_tokens=self.sequence.num_cached + self.sequence.num_fetched,
            last_chunk_end_us=self.chunks[-1].end_us,
        )

    def trace(self, worker_id: str, transport: str) -> PrefillTrace:
        """The timings so far."""
        return PrefillTrace(
            worker_id=worker_id,
            received_us=self.received_us,
            scheduled_us=self.scheduled_us,
            cached_tokens=self.sequence.num_cached,
            fetched_tokens=self.sequence.num_fetched,
            fetches=fetch_spans(self.sequence),
            chunks=tuple(self.chunks),
            waits=tuple(self.waits),
            writes=tuple(sorted(self.writes, key=lambda write: write.post_us)),
            transport=transport,
            blocks_moved=sum(write.num_blocks for write in self.writes),
            bytes_moved=self.bytes_moved,
        )
