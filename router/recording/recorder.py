"""Writes a line for each request that has ended, in a thread.

The event loop only puts the request into a bounded queue. Lines that cannot be written are lost and
counted; serving does not wait for them. The first line of a file, and of each process that appends
to it, names the format. Digests are keyed by the cluster's secret, so that all its routers write
the same ones.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec

from process.clock import clock_step_us
from router.recording.known_blocks import KnownBlocks, recorded_tokens
from router.requests.interface import TEST_PREFIX
from router.requests.served_generation import ServedGeneration

log = logging.getLogger(__name__)

FORMAT, VERSION = "baton_trace", 1
_PURPOSE = b"baton recording"
_MOST_WAITING = 4096
_AT_ONCE = 64
_CLOSE_TIMEOUT_S = 5.0

ResultListener = Callable[[str, int], None]
"""Called by the thread with "written" or "lost" and a number of requests."""


class _Ended(msgspec.Struct, frozen=True, gc=False):
    """The recorded facts of a request, before its digests are made."""

    generation: ServedGeneration
    hashes: Sequence[bytes]


class RecordedRequest(msgspec.Struct, frozen=True, omit_defaults=True, rename={"prompt": "in"}):
    """One line. Times are microseconds since the Unix epoch.

    - `took_us`: from the arrival to the last token.
    - `prompt` and `out` are numbers of tokens.
    - `session`, `share`: digests of the session and of the key's share; empty without one.
    - `blocks`: digests of the prompt's full blocks that follow the one with the digest `after`.
    """

    at_us: int
    took_us: int
    prompt: int
    out: int
    end: str
    session: str = ""
    share: str = ""
    priority: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    after: str = ""
    blocks: list[str] = []


class Output(Protocol):
    """The file; see `TraceFile`."""

    def has_room(self, num_bytes: int) -> bool: ...
    def rotate(self) -> None: ...
    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...


class Recorder:
    """Owns the file and the thread."""

    def __init__(self, file: Output, cluster_secret: str, on_result: ResultListener) -> None:
        self._file = file
        key = blake2b(cluster_secret.encode(), digest_size=32, person=_PURPOSE).digest()
        self._blocks = KnownBlocks(key)
        self._block_tokens = 0  # as in the last header
        self._on_result = on_result
        self._has_failed = False
        self._queue: SimpleQueue[_Ended | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="baton-recorder", daemon=True)
        self._thread.start()

    def take(self, generation: ServedGeneration) -> None:
        """Record a request that has ended. Operators' test prompts are left out, and requests that
        no worker got, because their prompts have no blocks."""
        request = generation.request
        if request.request_id.startswith(TEST_PREFIX) or not generation.trace.attempts:
            return
        if self._queue.qsize() >= _MOST_WAITING:
            self._on_result("lost", 1)
            return
        self._queue.put(_Ended(generation, request.hashes.known))

    def close(self) -> None:
        """Write the queued requests, and end the thread."""
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the recorder did not end within %g s", _CLOSE_TIMEOUT_S)

    # -- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        is_open = True
        while is_open:
            ended = [self._queue.get()]
            try:
                while len(ended) < _AT_ONCE:
                    ended.append(self._queue.get_nowait())
            except Empty:
                pass
            is_open = None not in ended
            if found := [each for each in ended if each is not None]:
                for result, number in Counter(map(self._record, found)).items():
                    self._on_result(result, number)
        self._file.close()

    def _record(self, ended: _Ended) -> str:
        """Write a request's line; "written" or "lost"."""
        try:
            self._write(ended)
        except OSError as error:
            if not self._has_failed:
                log.warning("record_trace: requests cannot be recorded: %s", error)
            self._has_failed = True
            self._forget()
            return "lost"
        self._has_failed = False
        return "written"

    def _write(self, ended: _Ended) -> None:
        data = self._lines(ended)
        if not self._file.has_room(len(data)):
            self._file.rotate()
            self._forget()
            data = self._lines(ended)
        self._file.write(data)

    def _forget(self) -> None:
        """Forget all blocks: a new file begins, whose lines must not refer to those of the last."""
        self._blocks.clear()
        self._block_tokens = 0

    def _lines(self, ended: _Ended) -> bytes:
        """The line of a request, after a header line if one is needed."""
        block_size = ended.generation.trace.attempts[-1].block_size
        head, tokens = b"", recorded_tokens(block_size)
        if tokens != self._block_tokens:
            self._blocks.clear()
            self._block_tokens = tokens
            head = msgspec.json.encode({FORMAT: VERSION, "block_tokens": tokens}) + b"\n"
        after, blocks = self._blocks.note(ended.hashes, block_size)
        return head + msgspec.json.encode(self._recorded(ended.generation, after, blocks)) + b"\n"

    def _recorded(
        self, generation: ServedGeneration, after: str, blocks: list[str]
    ) -> RecordedRequest:
        request, trace = generation.request, generation.trace
        return RecordedRequest(
            at_us=trace.received_us + clock_step_us(),
            took_us=max(0, (trace.last_token_us or trace.finished_us) - trace.received_us),
            prompt=len(request.token_ids),
            out=len(generation.stream.token_ids),
            end=generation.outcome,
            session=self._blocks.digest(request.session.encode()) if request.session else "",
            share=self._blocks.digest(request.share.encode()) if request.share else "",
            priority=request.priority,
            ttft_ms=request.ttft_target_ms,
            tpot_ms=request.tpot_target_ms,
            after=after,
            blocks=blocks,
        )
