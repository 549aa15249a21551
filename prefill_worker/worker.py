"""The prefill worker's loop: receive, schedule, compute a chunk, stream the blocks it completed.

A decode worker asks for a prompt, and learns that it has begun when this worker holds blocks for
all of it; then the decode worker grants. Computing never waits for that: blocks that are ready
before their grant are sent when it arrives. The blocks of a chunk are sent while the next chunk
computes, because the transfer service has its own thread. One step ahead, a chunk that gives no
token is offered at its launch: the transfer thread waits until its blocks are computed, while this
thread launches the next chunk. Owns the jobs, and their sequences' blocks until the handoff
releases them.
"""

from __future__ import annotations

import logging

import msgspec

from engine.fences import Fence
from engine.step_result import StepResult, Stored
from kv_transfer.handoff.key import ClosedHandoffs, HandoffKey, key_of
from kv_transfer.handoff.source import HandoffSource
from prefill_worker.job import Job
from process.sockets.control import Peer
from protocol.errors import RequestError
from protocol.flight import FlightKind
from protocol.messages import (
    Abort,
    ControlMessage,
    KvAsk,
    KvGrant,
    KvRenew,
    PeerDescriptor,
    Prefill,
    PrefillDone,
    Role,
)
from protocol.traces import ChunkSpan, PrefillTrace, WriteSpan
from scheduling.batch import Batch
from scheduling.sequence import Sequence, SequenceState
from worker.counters import Count
from worker.host import WorkerHost
from worker.outbound import OutboundHandoffs

log = logging.getLogger(__name__)

_REMEMBERED = 8192


class PrefillWorker:
    """One prefill worker; everything happens in the thread that calls `run`."""

    def __init__(self, host: WorkerHost, source: HandoffSource) -> None:
        self._host = host
        self._clock = host.clock
        self._counters = host.counters
        self._engine = host.engine
        self._scheduler = host.engine.scheduler
        self._source = source
        self._outbound = OutboundHandoffs(host, source, self)
        self._jobs: dict[HandoffKey, Job] = {}
        self._ended = ClosedHandoffs(_REMEMBERED)

    def run(self) -> None:
        """Serve until the process is told to stop and no jobs are left."""
        while not self._host.lifecycle.is_finished(num_jobs=len(self._jobs)):
            self.turn()
        for job in [job for job in self._jobs.values() if not job.unwanted]:
            reason, trace_id = "the worker stopped", job.sequence.trace_id
            failed = self._host.failure(job.key, reason, retryable=True, trace_id=trace_id)
            self._host.send(job.router, failed)

    def turn(self) -> None:
        """One turn of the loop."""
        self._receive()
        self._scheduler.shares.num_targets = self._outbound.num_sinks
        batch = self._engine.plan()
        self._begin(batch)
        outcome = self._host.steps.run(batch)
        for result in outcome.results:
            self._deliver(result)
        self._fail(outcome.failed, outcome.reason, retryable=not outcome.is_their_fault)
        self._host.publish(self._source.num_open, self._source.ignored)
        self._host.stall_alarm.look(
            self._clock.now(), self._holders, lambda: self._source.waits_for_grant
        )

    # -- receive ----------------------------------------------------------------------------

    def _receive(self) -> None:
        self._host.wait()
        if self._host.lifecycle.has_lapsed:
            for key in list(self._jobs):
                self._abort(key)
            self._outbound.abort_all("the source stood still")
            if self._source.num_open == 0:
                self._host.reincarnate()
        for peer, message in self._host.server.receive():
            self._handle(peer, message)
        for peer in self._host.server.lost(self._clock.now()):
            self._lose(peer)
        for event in self._host.transfers.drain():
            self._outbound.follow(event)
        self._outbound.sweep()

    def _handle(self, peer: Peer, message: ControlMessage) -> None:
        match message:
            case Prefill() if peer.role is Role.ROUTER:
                self._start(peer, message)
            case Abort() if peer.role is Role.ROUTER:
                self._abort(key_of(message))
            case PeerDescriptor() | KvAsk() | KvGrant() | KvRenew() | Abort() if (
                peer.role is Role.DECODE
            ):
                self._outbound.handle(peer, message)
            case _:
                self._host.answer_common(peer, message)

    def _start(self, router: Peer, message: Prefill) -> None:
        """Start a new attempt; older attempts at the same request end. An attempt that was here
        before is not started again."""
        key = key_of(message)
        others = [other for other in self._jobs if other.request_id == key.request_id]
        was_here = key in self._jobs or self._ended.error_of(key) is not None
        if was_here or any(other.attempt > key.attempt for other in others):
            self._counters.add(Count.STALE_MESSAGES)
            return
        for other in others:
            self._abort(other)
        self._host.flight.note(FlightKind.RECEIVED, key, tokens=len(message.token_ids))
        trace_id = message.trace_id
        if self._host.lifecycle.is_draining or self._host.lifecycle.has_lapsed:
            reason = "the worker stops"
            failure = self._host.failure(key, reason, retryable=True, trace_id=trace_id)
            self._host.send(router, failure)
            self._outbound.abort(key, reason)
            return
        now = self._clock.now()
        try:
            sequence = self._host.intake.sequence(message, now)
            self._scheduler.add(sequence)
        except (RequestError, ValueError) as error:
            reason = str(error)
            failure = self._host.failure(message, reason, retryable=False, trace_id=trace_id)
            self._host.send(router, failure)
            return
        now_us, is_resumable = self._clock.wall_us(), message.is_resumable
        job = Job(router, sequence, now_us, is_resumable=is_resumable)
        self._jobs[job.key] = job
        num_blocks = sequence.blocks_for(sequence.num_tokens)
        self._outbound.open(job.key, num_blocks, sequence.deadline)

    def _abort(self, key: HandoffKey) -> None:
        """The router no longer wants the attempt: stop computing and writing."""
        job = self._jobs.get(key)
        if job is None:
            self._counters.add(Count.STALE_MESSAGES)
            return
        job.unwanted = True
        self._host.flight.note(FlightKind.ABORTED, key)
        self._stop_computing(job)
        self._outbound.abort(key, "aborted")

    def _lose(self, peer: Peer) -> None:
        """A router or decode worker is gone: end its jobs. A resumable job that a decode worker
        waits for goes on: the decode worker decides how long the job is wanted."""
        for job in [job for job in self._jobs.values() if job.router == peer]:
            if not (job.is_resumable and self._outbound.is_asked_for(job.key)):
                self._abort(job.key)
        self._outbound.lose(peer)

    # -- schedule ---------------------------------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        """Before a batch runs: abort expired jobs, tell decode workers which prompts have begun,
        and send the blocks that were already cached."""
        for sequence in batch.expired:
            job = self._jobs.get(HandoffKey(*sequence.key))
            if job is not None:
                job.error = "its deadline passed"
                self._outbound.abort(job.key, job.error)
        for chunk in batch.chunks:
            job = self._jobs.get(HandoffKey(*chunk.sequence.key))
            if job is not None and not job.scheduled_us:
                job.scheduled_us = self._clock.wall_us()
                self._counters.add(Count.CACHED_TOKENS, chunk.start)
                self._host.flight.note(FlightKind.SCHEDULED, job.key, tokens=chunk.start)
                self._outbound.begin(job.key)
                num_cached = chunk.start // self._engine.layout.block_size
                self._offer(job, num_cached, chunk=-1, fence=self._engine.computed)

    # -- deliver ----------------------------------------------------------------------------

    def _deliver(self, result: StepResult) -> None:
        """Send the blocks that the step completed and the tokens of completed prompts."""
        for chunk in result.batch.chunks:
            job = self._jobs.get(HandoffKey(*chunk.sequence.key))
            if job is None:
                continue
            span = ChunkSpan(
                self._clock.wall_us(result.started),
                self._clock.wall_us(result.ended),
                chunk.num_tokens,
            )
            job.note_chunk(span, self._counters[Count.STEPS])
            self._host.flight.note_span(
                result.started, result.ended, FlightKind.CHUNK, job.key, tokens=chunk.num_tokens
            )
            self._counters.add(Count.PREFILL_TOKENS, chunk.num_tokens)
        for stored in result.stored:
            self._offer_chunk(stored)
        for produced, logprobs in zip(result.produced, result.logprobs, strict=True):
            job = self._jobs.get(HandoffKey(*produced.sequence.key))
            if job is not None:
                job.token = job.handoff_token(produced, logprobs)
                self._host.flight.note(FlightKind.FIRST_TOKEN, job.key)
                self._host.send(job.router, job.first_token(job.token, self._trace(job)))
                self._outbound.finish(job.key, job.token)
        for sequence, failure in result.failed:
            self._fail([sequence], failure.reason, code=failure.code)

    def _fail(
        self, sequences: list[Sequence], reason: str, retryable: bool = True, code: str = ""
    ) -> None:
        """A step or some of its rows failed: end their attempts; the worker goes on."""
        for sequence in sequences:
            job = self._jobs.get(HandoffKey(*sequence.key))
            if job is not None:
                job.error = reason
                job.is_hopeless, job.code = not retryable, code
                self._stop_computing(job)
                self._outbound.abort(job.key, reason)

    def _offer_chunk(self, stored: Stored) -> None:
        """Offer the blocks that a chunk has filled; the last one of a prompt need not be full."""
        chunk = stored.chunk
        job = self._jobs.get(HandoffKey(*chunk.sequence.key))
        if job is not None:
            num_tokens = chunk.start + chunk.num_tokens
            whole = num_tokens // self._engine.layout.block_size
            num_ready = chunk.sequence.blocks_for(num_tokens) if chunk.completes else whole
            self._offer(job, num_ready, job.num_stored, stored.fence)
            job.num_stored += 1

    def _offer(self, job: Job, num_ready: int, chunk: int, fence: Fence) -> None:
        """Offer the source the blocks that are ready once `fence` is passed."""
        first, job.num_ready = job.num_ready, num_ready
        if num_ready > first:
            blocks = job.sequence.block_table[first:num_ready]
            self._outbound.offer(job.key, first, blocks, chunk, fence)

    # -- callbacks of handoffs: see `HandoffOwner` ---------------------------------------------

    def on_written(self, key: HandoffKey, span: WriteSpan) -> None:
        """Blocks have arrived."""
        job = self._jobs.get(key)
        if job is not None:
            job.writes.append(span)
            since = self._clock.now() - (span.done_us - span.post_us) / 1e6
            self._host.flight.note(FlightKind.WRITE, key, number=span.num_blocks, since=since)

    def on_granted(self, key: HandoffKey) -> None:
        """The decode worker takes the blocks: they no longer count as waiting for it."""
        job = self._jobs.get(key)
        if job is not None:
            self._scheduler.shares.release(job.sequence)

    def on_unwanted(self, key: HandoffKey) -> None:
        """The decode worker gave up: stop computing; no more writes follow the outstanding ones."""
        job = self._jobs.get(key)
        if job is not None:
            self._stop_computing(job)

    def on_closed(self, key: HandoffKey, error: str) -> str:
        """The decode worker is told that the handoff ended, and the request's fault, if any."""
        job = self._jobs.get(key)
        if job is None:
            return ""
        job.answered = True
        job.error = job.error or error
        return job.code

    def on_released(self, key: HandoffKey) -> None:
        """The handoff is over: end the job and tell its router the outcome."""
        job = self._jobs.pop(key, None)
        if job is None:
            return
        self._ended.remember(key, "")
        self._stop_computing(job)
        self._scheduler.release_blocks(job.sequence)
        if job.unwanted:
            return
        if job.token is None or not job.answered or job.error:
            reason = job.error or self._source.error_of(key) or "the sink gave up"
            in_time = self._clock.now() < job.sequence.deadline
            retryable = in_time and not job.is_hopeless
            code, trace_id = job.code, job.sequence.trace_id
            failure = self._host.failure(key, reason, retryable, code=code, trace_id=trace_id)
            computed = job.computed_tokens
            failure = msgspec.structs.replace(failure, computed_tokens=computed)
            self._host.send(job.router, failure)
        else:
            self._host.flight.note(FlightKind.FINISHED, key)
            request_id, attempt = key
            done = PrefillDone(request_id=request_id, attempt=attempt, trace=self._trace(job))
            self._host.send(job.router, done)

    def _holders(self) -> list[str]:
        """What holds blocks, for people."""
        return [
            f"{len(job.sequence.block_table)} blocks: {job.key}, {job.sequence.state}, "
            f"for {job.sequence.target or 'an unnamed decode worker'}, "
            f"{self._source.state_of(job.key)}"
            for job in self._jobs.values()
            if job.sequence.block_table
        ]

    def _stop_computing(self, job: Job) -> None:
        if job.sequence.state is not SequenceState.FINISHED:
            self._scheduler.finish(job.sequence, release=False)

    def _trace(self, job: Job) -> PrefillTrace:
        return job.trace(
            self._host.worker_id,
            self._host.transfers.transport_name,
            self._engine.layout.block_bytes,
        )
