"""The prefill worker's loop: receive, schedule, compute a chunk, stream the blocks it completed.

Computing never waits for a grant: blocks that are ready before their grant are sent when it
arrives. The blocks of a chunk are sent while the next chunk computes, because the transfer service
has its own thread. On a card that thread also waits until the blocks are computed, while this
thread launches the next chunk. Owns the jobs, and their sequences' blocks until the handoff
releases them.
"""

from __future__ import annotations

import logging

from engine.step_result import StepResult
from kv_transfer.handoff.key import ClosedHandoffs, HandoffKey, key_of
from kv_transfer.handoff.sender import HandoffSender
from prefill_worker.job import Job
from process.sockets.control import Peer
from protocol.errors import RequestError
from protocol.messages import (
    Abort,
    ControlMessage,
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

    def __init__(self, host: WorkerHost, sender: HandoffSender) -> None:
        self._host = host
        self._engine = host.engine
        self._engine.runs_ahead = True  # no peer writes to our pool
        self._scheduler = host.engine.scheduler
        self._outbound = OutboundHandoffs(host, sender, self)
        self._jobs: dict[HandoffKey, Job] = {}
        self._ended = ClosedHandoffs(_REMEMBERED)

    def run(self) -> None:
        """Serve until the process is told to stop and no jobs are left."""
        while not self._host.is_finished(num_jobs=len(self._jobs)):
            self.turn()
        for job in [job for job in self._jobs.values() if not job.unwanted]:
            failed = self._host.failure(job.key, "the worker stopped", retryable=True)
            self._host.send(job.router, failed)

    def turn(self) -> None:
        """One turn of the loop."""
        self._receive()
        batch = self._engine.plan()
        self._begin(batch)
        outcome = self._host.run_step(batch)
        for result in outcome.results:
            self._deliver(result)
        self._fail(outcome.failed, outcome.reason, retryable=not outcome.is_their_fault)
        self._host.publish(self._outbound.num_open, self._outbound.ignored)

    # -- receive ----------------------------------------------------------------------------

    def _receive(self) -> None:
        self._host.wait()
        if self._host.has_lapsed:
            for key in list(self._jobs):
                self._abort(key)
            if self._outbound.num_open == 0:
                self._host.reincarnate()
        for peer, message in self._host.server.receive():
            self._handle(peer, message)
        for peer in self._host.server.lost(self._host.now()):
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
            case PeerDescriptor() | KvGrant() | KvRenew() | Abort() if peer.role is Role.DECODE:
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
            self._host.count(Count.STALE_MESSAGES)
            return
        for other in others:
            self._abort(other)
        if self._host.is_draining or self._host.has_lapsed:
            self._host.send(router, self._host.failure(key, "the worker stops", retryable=True))
            return
        now = self._host.now()
        try:
            sequence = self._host.intake.sequence(message, now)
            self._scheduler.add(sequence)
        except (RequestError, ValueError) as error:
            self._host.send(router, self._host.failure(message, str(error), retryable=False))
            return
        now_us, is_resumable = self._host.wall_us(), message.is_resumable
        job = Job(router, sequence, now_us, is_resumable=is_resumable)
        self._jobs[job.key] = job
        num_blocks = sequence.blocks_for(sequence.num_tokens)
        self._outbound.open(job.key, num_blocks, sequence.deadline)

    def _abort(self, key: HandoffKey) -> None:
        """The router no longer wants the attempt: stop computing and writing."""
        job = self._jobs.get(key)
        if job is None:
            self._host.count(Count.STALE_MESSAGES)
            return
        job.unwanted = True
        self._stop_computing(job)
        self._outbound.abort(key, "aborted")

    def _lose(self, peer: Peer) -> None:
        """A router or decode worker is gone: end its jobs. A resumable job that a decode worker
        waits for goes on: the decode worker decides how long the job is wanted."""
        for job in [job for job in self._jobs.values() if job.router == peer]:
            if not (job.is_resumable and self._outbound.is_granted(job.key)):
                self._abort(job.key)
        self._outbound.lose(peer)

    # -- schedule ---------------------------------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        """Before a batch runs: abort expired jobs and send the blocks that were already cached."""
        for sequence in batch.expired:
            job = self._jobs.get(HandoffKey(*sequence.key))
            if job is not None:
                job.error = "its deadline passed"
                self._outbound.abort(job.key, job.error)
        for chunk in batch.chunks:
            job = self._jobs.get(HandoffKey(*chunk.sequence.key))
            if job is not None and not job.scheduled_us:
                job.scheduled_us = self._host.wall_us()
                self._host.count(Count.CACHED_TOKENS, chunk.start)
                self._offer(job, chunk.start // self._engine.layout.block_size, chunk=-1)

    # -- deliver ----------------------------------------------------------------------------

    def _deliver(self, result: StepResult) -> None:
        """Send the blocks that the step completed and the tokens of completed prompts."""
        for chunk in result.batch.chunks:
            job = self._jobs.get(HandoffKey(*chunk.sequence.key))
            if job is None:
                continue
            span = ChunkSpan(
                self._host.wall_us(result.started),
                self._host.wall_us(result.ended),
                chunk.num_tokens,
            )
            job.chunks.append(span)
            self._host.count(Count.PREFILL_TOKENS, chunk.num_tokens)
            num_tokens = chunk.start + chunk.num_tokens
            whole = num_tokens // self._engine.layout.block_size
            num_ready = chunk.sequence.blocks_for(num_tokens) if chunk.completes else whole
            self._offer(job, num_ready, chunk=len(job.chunks) - 1)
        for produced, logprobs in zip(result.produced, result.logprobs, strict=True):
            job = self._jobs.get(HandoffKey(*produced.sequence.key))
            if job is not None:
                job.token = job.handoff_token(produced, logprobs)
                self._host.send(job.router, job.first_token(job.token, self._trace(job)))
                self._outbound.finish(job.key, job.token)
        for sequence, failure in result.failed:
            self._fail([sequence], failure.reason, failure.retryable)

    def _fail(self, sequences: list[Sequence], reason: str, retryable: bool = True) -> None:
        """A step or some of its rows failed: end their attempts; the worker goes on."""
        for sequence in sequences:
            job = self._jobs.get(HandoffKey(*sequence.key))
            if job is not None:
                job.error = reason
                job.is_hopeless = not retryable
                self._stop_computing(job)
                self._outbound.abort(job.key, reason)

    def _offer(self, job: Job, num_ready: int, chunk: int) -> None:
        """Offer the sender the blocks that have become ready."""
        first, job.num_ready = job.num_ready, num_ready
        if num_ready > first:
            blocks = job.sequence.block_table[first:num_ready]
            self._outbound.offer(job.key, first, blocks, chunk)

    # -- callbacks of handoffs: see `HandoffOwner` ---------------------------------------------

    def on_written(self, key: HandoffKey, span: WriteSpan) -> None:
        """Blocks have arrived."""
        job = self._jobs.get(key)
        if job is not None:
            job.writes.append(span)

    def on_unwanted(self, key: HandoffKey) -> None:
        """The decode worker gave up: stop computing; no more writes follow the outstanding ones."""
        job = self._jobs.get(key)
        if job is not None:
            self._stop_computing(job)

    def on_closed(self, key: HandoffKey, error: str) -> None:
        """The decode worker is told that the handoff ended."""
        job = self._jobs.get(key)
        if job is not None:
            job.answered = True
            job.error = job.error or error

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
            reason = job.error or self._outbound.error_of(key) or "the decode worker gave up"
            in_time = self._host.now() < job.sequence.deadline
            retryable = in_time and not job.is_hopeless
            self._host.send(job.router, self._host.failure(key, reason, retryable))
        else:
            request_id, attempt = key
            done = PrefillDone(request_id=request_id, attempt=attempt, trace=self._trace(job))
            self._host.send(job.router, done)

    def _stop_computing(self, job: Job) -> None:
        if job.sequence.state is not SequenceState.FINISHED:
            self._scheduler.finish(job.sequence, release=False)

    def _trace(self, job: Job) -> PrefillTrace:
        return job.trace(
            self._host.worker_id,
            self._host.transfers.transport_name,
            self._engine.layout.block_bytes,
        )
