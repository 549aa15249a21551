"""A worker that computes nothing, so that benchmarks measure the router in front of it.

    python -m bench.router.mock_worker decode '{"redis_url": ..., ...}'

Speaks the fleet's own protocol: lease, hello, load reports, one message per step and router.
Every step gives each running request one token, at once or after `step_ms`. There is no KV: a
prefill worker answers with the first token, and its decode worker continues with the next.
Log-probabilities are made up; requests for them share `burst` tokens per step. `late_steps` names a
file for the pauses between steps that are longer than `step_ms`, see `bench.router.late_steps`.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
import uuid
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import msgspec
import zmq

from bench.router.late_steps import LateSteps
from process.clock import wall_us
from process.lifecycle import StopSignal
from process.sockets.control import ControlServer, Peer
from process.sockets.encrypted_sockets import Network
from process.sockets.events import EventPublisher
from process.sockets.hello import HelloPolicy
from process.store.worker_lease import WorkerLease
from protocol.control_message import ControlMessage
from protocol.events import WorkerStats
from protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    CacheDump,
    CacheDumpRequest,
    FinishReason,
    FirstToken,
    Generate,
    Prefill,
    PrefillDone,
    Role,
    SequenceTokens,
    StepTokens,
)
from protocol.registration import WorkerInfo, WorkerState
from protocol.sampling import PromptLogprobs, SamplingParams, TokenLogprobs
from protocol.traces import DecodeTrace, PrefillTrace, StepSpan, pack_steps

_ENDPOINT = "tcp://127.0.0.1:*"
_IDLE_MS = 100
_STATS_S = 0.1
_LEASE_S = 5.0
_NUM_BLOCKS = 1_000_000
_SAME = "mock"


class MockSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a mock worker; it generates `token_ids` over and over."""

    worker_id: str
    redis_url: str
    cluster_secret: str
    model: str
    token_ids: list[int]
    max_context: int
    step_ms: float = 0.0
    burst: int = 1
    late_steps: str
    parent_pid: int | None = None


@dataclass(slots=True)
class _Run:
    """A request that gets a token per step; `index` is that of the next token."""

    router: Peer
    message: Generate
    index: int
    received_us: int
    is_first: bool = True


@dataclass
class MockWorker:
    """The sockets of one mock worker, and the requests that it pretends to run."""

    settings: MockSettings
    role: Role
    server: ControlServer
    publisher: EventPublisher
    incarnation: str
    stop: StopSignal
    late_steps: LateSteps
    runs: dict[tuple[str, int], _Run] = field(default_factory=dict)

    def serve(self) -> None:
        """Serve until told to stop."""
        poller = zmq.Poller()
        poller.register(self.server.socket, zmq.POLLIN)
        stats_at = next_step = 0.0
        while not self.stop.is_set:
            now = time.monotonic()
            if now >= stats_at:
                self.publisher.publish(self._stats())
                stats_at = now + _STATS_S
            if not self.runs:
                self.late_steps.idle()
            wait_s = _IDLE_MS / 1e3 if not self.runs else next_step - now
            poller.poll(max(0, round(wait_s * 1e3)))
            for peer, message in self.server.receive():
                self._take(peer, message)
            self.server.lost(time.monotonic())
            if self.runs and time.monotonic() >= next_step:
                next_step = time.monotonic() + self.settings.step_ms / 1e3
                self._step()
                self.late_steps.sent(time.monotonic())

    def _take(self, peer: Peer, message: ControlMessage) -> None:
        if isinstance(message, CacheDumpRequest):
            nonce = message.nonce
            dump = CacheDump(incarnation=self.incarnation, seq=0, hashes=[], nonce=nonce)
            self.server.send(peer, dump)
        elif isinstance(message, Abort):
            self.runs.pop((message.request_id, message.attempt), None)
        elif isinstance(message, Prefill):
            self._prefill(peer, message)
        elif isinstance(message, Generate):
            index = message.num_output + (message.prefill is not None)
            if index < message.sampling.max_tokens:
                run = _Run(peer, message, index, wall_us())
                self.runs[message.request_id, message.attempt] = run

    def _prefill(self, peer: Peer, message: Prefill) -> None:
        now, is_last = wall_us(), message.num_output + 1 == message.sampling.max_tokens
        trace = PrefillTrace(
            worker_id=self.settings.worker_id,
            received_us=now,
            scheduled_us=now,
            cached_tokens=0,
            chunks=(),
        )
        self.server.send(
            peer,
            FirstToken(
                request_id=message.request_id,
                attempt=message.attempt,
                index=message.num_output,
                token_id=self._token(message.num_output),
                logprobs=_logprobs(message.sampling),
                prompt_logprobs=_prompt_logprobs(message),
                finish=FinishReason.LENGTH if is_last else None,
                trace=trace,
            ),
        )
        done = PrefillDone(request_id=message.request_id, attempt=message.attempt, trace=trace)
        self.server.send(peer, done)

    def _step(self) -> None:
        outbox: dict[Peer, list[SequenceTokens]] = defaultdict(list)
        for key, run in list(self.runs.items()):
            tokens = self._next(run)
            outbox[run.router].append(tokens)
            if tokens.finish is not None:
                del self.runs[key]
        for router, sequences in outbox.items():
            self.server.send(router, StepTokens(sequences=sequences))

    def _next(self, run: _Run) -> SequenceTokens:
        index, is_first, sampling = run.index, run.is_first, run.message.sampling
        count = 1
        if sampling.logprobs is not None:
            burst = max(1, self.settings.burst // len(self.runs))
            count = min(burst, sampling.max_tokens - index)
        run.index, run.is_first = index + count, False
        is_last = run.index >= sampling.max_tokens
        logprobs = _logprobs(sampling)
        is_scored = is_first and run.message.prefill is None
        return SequenceTokens(
            request_id=run.message.request_id,
            attempt=run.message.attempt,
            index=index,
            token_ids=[self._token(each) for each in range(index, run.index)],
            logprobs=None if logprobs is None else [logprobs] * count,
            finish=FinishReason.LENGTH if is_last else None,
            cached_tokens=0 if is_first else None,
            prompt_logprobs=_prompt_logprobs(run.message) if is_scored else None,
            trace=self._trace(run) if is_last else None,
        )

    def _trace(self, run: _Run) -> DecodeTrace:
        return DecodeTrace(
            worker_id=self.settings.worker_id,
            received_us=run.received_us,
            admitted_us=run.received_us,
            finished_us=wall_us(),
            num_decode_steps=run.index - run.message.num_output,
            steps_since_us=run.received_us,
            steps=_steps(run.index - run.message.num_output),
        )

    def _token(self, index: int) -> int:
        return self.settings.token_ids[index % len(self.settings.token_ids)]

    def _stats(self) -> WorkerStats:
        return WorkerStats(
            worker_id=self.settings.worker_id,
            incarnation=self.incarnation,
            num_waiting=0,
            num_running=len(self.runs),
            queued_tokens=0,
            blocks_total=_NUM_BLOCKS,
            blocks_used=0,
            blocks_cached=0,
            reported_us=wall_us(),
            received=self.server.legs_received,
        )


@lru_cache(maxsize=1024)
def _steps(count: int) -> bytes:
    """`count` steps, as a real worker's trace has them."""
    spans = [StepSpan(each * 1000, each * 1000 + 900, 8) for each in range(count)]
    return pack_steps(0, spans)


def _logprobs(sampling: SamplingParams) -> TokenLogprobs | None:
    if sampling.logprobs is None:
        return None
    return TokenLogprobs(-0.5, tuple((place, -1.5) for place in range(sampling.logprobs)))


def _prompt_logprobs(message: Generate | Prefill) -> PromptLogprobs | None:
    count, rows = message.sampling.prompt_logprobs, len(message.token_ids) - 1
    if count is None or message.num_output:
        return None
    values = struct.pack("<f", -1.5)
    return PromptLogprobs(
        count,
        values * rows,
        struct.pack("<i", 1) * rows,
        struct.pack(f"<{count}i", *range(count)) * rows,
        values * count * rows,
    )


def main(argv: list[str]) -> int:
    """Serve until a signal arrives or the parent ends."""
    role, settings = Role(argv[0]), msgspec.json.decode(argv[1].encode(), type=MockSettings)
    with ExitStack() as stack:
        network = Network(settings.cluster_secret)
        stack.callback(network.close)
        policy = HelloPolicy(settings.worker_id, uuid.uuid4().hex, _SAME, _SAME)
        server = ControlServer(network, _ENDPOINT, policy, silence_s=30.0)
        publisher = EventPublisher(network, _ENDPOINT)
        stop = StopSignal(lambda: None, settings.parent_pid)
        stack.callback(stop.close)
        late_steps = LateSteps(Path(settings.late_steps), settings.step_ms / 1e3)
        stack.callback(late_steps.close)
        worker = MockWorker(settings, role, server, publisher, policy.incarnation, stop, late_steps)
        info = _info(settings, role, policy, (server.endpoint, publisher.endpoint))
        lease = WorkerLease(settings.redis_url, "default", info, _LEASE_S)
        stack.callback(lease.close)
        lease.start()
        worker.serve()
    return 0


def _info(
    settings: MockSettings, role: Role, policy: HelloPolicy, endpoints: tuple[str, str]
) -> WorkerInfo:
    return WorkerInfo(
        worker_id=policy.worker_id,
        incarnation=policy.incarnation,
        role=role,
        state=WorkerState.READY,
        host=socket.gethostname(),
        pid=os.getpid(),
        control=endpoints[0],
        events=endpoints[1],
        protocol_version=PROTOCOL_VERSION,
        model=settings.model,
        model_fingerprint=_SAME,
        layout_fingerprint=_SAME,
        transport=_SAME,
        block_size=16,
        num_blocks=_NUM_BLOCKS,
        max_context=settings.max_context,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
