"""The course of an attempt that runs: its tokens put in order and delivered, or its failure.

Changes the generation and tells its events; knows no fleet, and starts no attempt.
"""

from __future__ import annotations

import asyncio

from protocol.errors import ProtocolError
from router.fleet.worker import Loss, Worker
from router.metrics import FleetMetrics
from router.requests.attempt import Attempt
from router.requests.generation import Failure, Generation
from router.requests.interface import TokenDelta
from router.requests.labels import failure_kind
from router.requests.token_stream import Piece
from router.requests.trace import TraceStore
from router.settings import RoutingSettings


class AttemptCourse:
    """Takes what workers send for the current attempt of a generation."""

    def __init__(
        self, settings: RoutingSettings, traces: TraceStore, metrics: FleetMetrics
    ) -> None:
        self._settings = settings
        self._traces = traces
        self._metrics = metrics

    def take(self, generation: Generation, worker: Worker, piece: Piece, now_us: int) -> None:
        """Put the tokens that came at `now_us` in order and deliver the new ones; a gap fails the
        attempt."""
        attempt, stream = generation.attempt, generation.stream
        assert attempt is not None
        if attempt.reservations:
            attempt.release(worker)
        try:
            fresh = stream.take(piece)
        except ProtocolError as error:
            self.fail(generation, worker, Failure(f"{worker.worker_id}: {error}"))
            return
        num_new = len(stream.token_ids) - attempt.first_index
        if fresh and generation.num_attempts > 1:  # a first attempt follows no failure
            generation.failures.on_progress(attempt, num_new)
        trace = generation.trace
        is_first = bool(fresh) and not trace.first_token_received_us
        if is_first:
            trace.first_token_received_us = now_us
            trace.first_attempt, trace.num_cached_tokens = attempt.number, generation.cached_tokens
        for each in fresh:
            cached, prompt_logprobs = generation.cached_tokens, each.prompt_logprobs
            delta = TokenDelta(each.token_ids, each.logprobs, each.finish, cached, prompt_logprobs)
            generation.deliver(delta)
            if is_first:
                now_us = self._traces.wall_us()  # the first token is timed when it is delivered
                trace.first_token_us = trace.first_token_us or now_us
            trace.last_token_us = now_us
        trace.num_output_tokens = len(stream.token_ids)
        if stream.finish is not None:
            generation.drop_attempt()
            return
        if generation.is_behind and len(generation.events) > self._settings.max_unread_deltas:
            self._give_up(generation, "its client does not read")
            return
        if num_new > 1:
            attempt.decode_runs = True  # only the decode worker produces more than one token
        if stream.held or attempt.gap_timer is not None:
            self._watch_gap(generation, attempt)

    def _watch_gap(self, generation: Generation, attempt: Attempt) -> None:
        """Fail the attempt if tokens that overtook the first one wait too long for it."""
        if not generation.stream.held:
            if attempt.gap_timer is not None:
                attempt.gap_timer.cancel()
                attempt.gap_timer = None
        elif attempt.gap_timer is None:
            source = attempt.prefill or attempt.decode
            failure = Failure(f"{source.worker_id}: its first token did not come")
            attempt.gap_timer = asyncio.get_running_loop().call_later(
                self._settings.first_token_wait_s, self.fail, generation, source, failure
            )

    def fail(
        self, generation: Generation, worker: Worker, failure: Failure, loss: Loss | None = None
    ) -> None:
        """End the current attempt and blame one of its workers, unless the request is at fault."""
        abort_reason = failure.reason if failure.code else "another leg failed"
        attempt = self._end_attempt(generation, failure.reason, abort_reason, failed=worker)
        self._metrics.failures.add(failure_kind(failure.retryable, failure.lacks_room, loss))
        if failure.lacks_room:
            generation.failures.avoid(worker)
        elif not failure.code:
            generation.failures.blame(attempt, worker, loss)
        generation.events.put(failure)

    def _give_up(self, generation: Generation, reason: str) -> None:
        """End the current attempt without blaming its workers, and start no other."""
        self._end_attempt(generation, reason, reason)
        generation.events.put(Failure(reason, retryable=False))

    def _end_attempt(
        self, generation: Generation, reason: str, abort_reason: str, failed: Worker | None = None
    ) -> Attempt:
        """Drop the attempt, ignore its later messages, abort every leg but the failed one. The
        trace gets `reason`, the legs `abort_reason`."""
        attempt = generation.drop_attempt()
        assert attempt is not None, "only a running attempt is ended"
        attempt.abort(generation.request.request_id, abort_reason, failed=failed)
        trace = generation.trace.find(attempt.number)
        assert trace is not None, "every attempt is noted in the trace"
        trace.failed, trace.failed_us = reason, self._traces.wall_us()
        return attempt
