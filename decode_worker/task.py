"""One attempt on a decode worker: its router, its missing input and its trace."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from protocol.handoff_messages import HandoffToken
from protocol.messages import FinishReason, HandedOver, HandOver, KvPeer, Resumed, SequenceTokens
from protocol.sampling import PromptLogprobs, TokenLogprobs
from protocol.traces import GAP_US, DecodeTrace, GapSpan, StepSpan, pack_steps
from scheduling.batch import Produced
from scheduling.sequence import SequenceState
from worker.inbound.holders import fetch_spans
from worker.tasks import Task


@dataclass(eq=False)
class DecodeTask(Task):
    """An attempt from its Generate message until its last token.

    A task with remote prefill joins the batch when it has both its `token` and all its blocks. One
    that outlives its router is an orphan (`orphaned_at`, seconds of the loop's clock).
    The attempt that gave the output's first token did not compute `cached_tokens` tokens of the
    prompt. When this worker admitted the task, it had the KV of `held_tokens` tokens.
    """

    prefill: KvPeer | None = None
    token: HandoffToken | None = None
    admitted_us: int = 0
    granted_blocks: int = 0
    blocks_arrived_us: int = 0
    first_token_us: int = 0
    first_step_us: int = 0
    seen_preemptions: int = 0
    is_announced: bool = False
    orphaned_at: float | None = None
    num_emitted: int = 0
    cached_tokens: int = 0
    held_tokens: int = 0
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    steps: list[StepSpan] = field(default_factory=list)
    stalls: list[GapSpan] = field(default_factory=list)

    def __post_init__(self) -> None:
        """A task that continues an earlier attempt lacks the log-probabilities of that attempt's
        tokens, so it cannot be resumed if the request wants them."""
        super().__post_init__()
        sequence = self.sequence
        self.num_emitted = sequence.num_output
        if sequence.sampling.logprobs is not None and sequence.num_output:
            self.is_resumable = False

    def note_step(self, span: StepSpan) -> None:
        """Record a step that decoded a token of the task; the tasks of a step share its span."""
        if self.steps and span.start_us - self.steps[-1].end_us > GAP_US:
            start_us = self.steps[-1].end_us
            self.stalls.append(GapSpan(start_us, span.start_us, self._stall_reason(start_us)))
        self.seen_preemptions = self.sequence.num_preemptions
        self.steps.append(span)

    def _stall_reason(self, since_us: int) -> str:
        """Why no step has decoded a token of the task since `since_us`."""
        if self.sequence.num_preemptions == self.seen_preemptions:
            return "the worker ran no step for it"
        again = sum(each.num_tokens for each in self.chunks if each.start_us >= since_us)
        return f"preempted: its blocks went to an older sequence; {again} tokens computed again"

    def waits_for(self, incarnation: str) -> bool:
        """Whether this source still has to send the first token or blocks."""
        has_all = self.token is not None and bool(self.blocks_arrived_us)
        return (
            not has_all
            and self._is_remote
            and self.prefill is not None
            and self.prefill.incarnation == incarnation
        )

    @property
    def _is_remote(self) -> bool:
        """Whether another worker computes the prompt and not all blocks are here."""
        state = self.sequence.state
        is_asking = state is SequenceState.WAITING and self.sequence.remote
        return is_asking or state is SequenceState.RECEIVING

    def waits_for_token_of(self, incarnation: str) -> bool:
        """Whether this source still has to send the first token."""
        return self.token is None and self.waits_for(incarnation)

    def tokens(
        self, produced: Produced, logprobs: TokenLogprobs | None, trace: DecodeTrace | None
    ) -> SequenceTokens:
        """One token for the router; the attempt's first token carries the cached-token count."""
        first, self.is_announced = not self.is_announced, True
        self.num_emitted, self.finish = produced.index + 1, produced.finish
        if produced.index == 0:
            self.cached_tokens = self._not_computed()
        if logprobs is not None and self.is_resumable:
            self.logprobs.append(logprobs)
        return SequenceTokens(
            request_id=self.sequence.request_id,
            attempt=self.attempt,
            index=produced.index,
            token_ids=[produced.token_id],
            logprobs=None if logprobs is None else [logprobs],
            finish=produced.finish,
            cached_tokens=self.cached_tokens if first else None,
            prompt_logprobs=self._take_prompt_logprobs() if first else None,
            trace=trace,
        )

    def _not_computed(self) -> int:
        """Number of prompt tokens that were not computed for the output's first token."""
        if self.token is not None:
            return self.token.cached_tokens
        return max(0, self.sequence.num_prompt - self.computed_tokens)

    def _take_prompt_logprobs(self) -> PromptLogprobs | None:
        """The prompt's log-probabilities, from the peer or computed here; removes them from the
        task."""
        if self.token is None:
            return self.sequence.take_prompt_logprobs()
        prompt_logprobs = self.token.prompt_logprobs
        self.token = msgspec.structs.replace(self.token, prompt_logprobs=None)
        return prompt_logprobs

    def resumed(self, attempt: int, trace: DecodeTrace | None) -> Resumed:
        """All tokens so far, for the router that resumes the task as `attempt`."""
        num_prompt = self.sequence.num_prompt
        wants_logprobs = self.sequence.sampling.logprobs is not None
        return Resumed(
            request_id=self.sequence.request_id,
            attempt=attempt,
            token_ids=self.sequence.tokens[num_prompt : num_prompt + self.num_emitted],
            logprobs=list(self.logprobs) if wants_logprobs else None,
            finish=self.finish,
            cached_tokens=self.cached_tokens,
            trace=trace,
        )

    def handed_over(self, asked: HandOver, keeps_kv: bool, trace: DecodeTrace) -> HandedOver:
        """The answer to `asked`: the attempt has ended on this worker."""
        return HandedOver(
            request_id=self.sequence.request_id,
            attempt=self.attempt,
            next_attempt=asked.next_attempt,
            num_output=self.sequence.num_output,
            keeps_kv=keeps_kv,
            trace=trace,
        )

    def trace(self, worker_id: str, finished_us: int) -> DecodeTrace:
        """The task's timings."""
        return DecodeTrace(
            worker_id=worker_id,
            received_us=self.received_us,
            admitted_us=self.admitted_us,
            granted_blocks=self.granted_blocks,
            cached_tokens=self.held_tokens,
            fetched_tokens=self.sequence.num_fetched,
            fetches=fetch_spans(self.sequence),
            chunks=tuple(self.chunks),
            blocks_arrived_us=self.blocks_arrived_us,
            first_token_us=self.first_token_us,
            first_step_us=self.first_step_us,
            finished_us=finished_us,
            num_decode_steps=len(self.steps),
            num_preemptions=self.sequence.num_preemptions,
            steps_since_us=self.steps[0].start_us if self.steps else 0,
            steps=pack_steps(self.steps[0].start_us, self.steps) if self.steps else b"",
            stalls=tuple(self.stalls),
        )
