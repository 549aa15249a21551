"""Requests that leave this worker mid-stream, with their KV blocks.

A sequence that ends here keeps its blocks until the decode worker that continues it has copied
them. This worker is the source of an ordinary handoff: its prompt is everything computed here, its
first token the last one sampled here. Owns these sequences' blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.task import DecodeTask
from kv_transfer.handoff.key import HandoffKey
from kv_transfer.handoff.source import HandoffSource
from process.sockets.control import Peer
from protocol.flight import FlightKind
from protocol.handoff_messages import HandoffToken
from protocol.messages import PrefillDone
from protocol.traces import PrefillTrace, WriteSpan
from scheduling.sequence import Sequence
from worker.counters import Count
from worker.host import WorkerHost
from worker.moved_blocks import moved_blocks
from worker.outbound import OutboundHandoffs


@dataclass(eq=False)
class _Departure:
    router: Peer
    sequence: Sequence
    begun_us: int
    answered: bool = False  # the sink was told that the handoff ended
    unwanted: bool = False  # the router aborted it and gets no answer
    error: str = ""
    writes: list[WriteSpan] = field(default_factory=list)
    bytes_moved: int = 0


class Departures:
    """All leaving requests, by the attempt that continues them elsewhere."""

    def __init__(self, host: WorkerHost, source: HandoffSource) -> None:
        self._host = host
        self._clock = host.clock
        self._counters = host.counters
        self._scheduler = host.engine.scheduler
        self._source = source
        self.outbound = OutboundHandoffs(host, source, self)
        self._departures: dict[HandoffKey, _Departure] = {}

    @property
    def num_open(self) -> int:
        """Number of requests whose blocks are still needed here."""
        return len(self._departures)

    def begin(self, task: DecodeTask, attempt: int) -> None:
        """Offer the blocks of a finished task, which are not released yet, to `attempt`.

        The KV of all tokens but the newest is here; the newest is the first token of the next part.
        """
        sequence = task.sequence
        key = HandoffKey(sequence.request_id, attempt)
        num_blocks = sequence.blocks_for(sequence.num_computed)
        now_us = self._clock.wall_us()
        self._departures[key] = _Departure(task.router, sequence, now_us)
        token = HandoffToken(
            request_id=key.request_id,
            attempt=key.attempt,
            index=sequence.num_output - 1,
            token_id=sequence.tokens[-1],
            cached_tokens=task.cached_tokens,
            last_chunk_end_us=now_us,
        )
        prompt = sequence.digest(sequence.num_computed)
        self.outbound.open(key, num_blocks, sequence.deadline, prompt)
        self.outbound.begin(key)
        for group in range(len(self._host.engine.layout.groups)):
            blocks = moved_blocks(sequence, group, sequence.num_computed)
            self.outbound.offer(key, blocks, chunk=-1, fence=self._host.engine.computed)
        self.outbound.finish(key, token)

    def try_abort(self, key: HandoffKey) -> bool:
        """Abort a request that its router no longer wants; False if there is none."""
        departure = self._departures.get(key)
        if departure is None:
            return False
        departure.unwanted = True
        self.outbound.abort(key, "aborted")
        return True

    def abort_all(self) -> None:
        """Abort all leaving requests."""
        for key in list(self._departures):
            self.try_abort(key)

    def give_up(self, reason: str) -> None:
        """Tell the routers to continue their requests without these blocks, because the process
        ends."""
        for key, departure in self._departures.items():
            if not departure.unwanted:
                self._send_failure(key, departure, reason)

    # -- events -----------------------------------------------------------------------------

    def lose(self, peer: Peer) -> None:
        """End the requests that a lost router was moving."""
        for key, departure in list(self._departures.items()):
            if departure.router == peer:
                self.try_abort(key)

    # -- callbacks of handoffs: see `HandoffOwner` --------------------------------------------

    def on_written(self, key: HandoffKey, span: WriteSpan, num_bytes: int) -> None:
        """Blocks have arrived."""
        self._departures[key].writes.append(span)
        self._departures[key].bytes_moved += num_bytes
        since = self._clock.now() - (span.done_us - span.post_us) / 1e6
        self._host.flight.note(FlightKind.WRITE, key, number=span.num_blocks, since=since)

    def on_granted(self, key: HandoffKey) -> None:
        """The sink granted its blocks; nothing is to be done here."""

    def on_unwanted(self, key: HandoffKey) -> None:
        """The sink gave up; there is no computation here to stop."""

    def on_closed(self, key: HandoffKey, error: str) -> str:
        """Note that the sink is told that the handoff ended. Returns "", because no request is at
        fault."""
        departure = self._departures.get(key)
        if departure is not None:
            departure.answered = True
            departure.error = error
        return ""

    def on_released(self, key: HandoffKey) -> None:
        """The handoff is over: release the blocks (full ones stay cached) and tell the router the
        outcome."""
        departure = self._departures.pop(key)
        self._scheduler.release_blocks(departure.sequence)
        if departure.unwanted:
            return
        error = departure.error or self._source.error_of(key)
        if error or not departure.answered:
            reason = error or "the sink gave up"
            self._send_failure(key, departure, reason)
            return
        self._counters.add(Count.HANDOVERS)
        done = PrefillDone(
            request_id=key.request_id, attempt=key.attempt, trace=self._trace(departure)
        )
        self._host.send(departure.router, done)

    def _send_failure(self, key: HandoffKey, departure: _Departure, reason: str) -> None:
        trace_id = departure.sequence.trace_id
        failure = self._host.failure(key, reason, retryable=True, trace_id=trace_id)
        self._host.send(departure.router, failure)

    def _trace(self, departure: _Departure) -> PrefillTrace:
        return PrefillTrace(
            worker_id=self._host.worker_id,
            received_us=departure.begun_us,
            scheduled_us=departure.begun_us,
            cached_tokens=departure.sequence.num_computed,
            chunks=(),
            writes=tuple(sorted(departure.writes, key=lambda write: write.post_us)),
            transport=self._host.transfers.transport_name,
            blocks_moved=sum(write.num_blocks for write in departure.writes),
            bytes_moved=departure.bytes_moved,
        )
