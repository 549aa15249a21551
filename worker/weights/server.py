"""Sends this worker's checkpoint to workers that start, see `protocol.weight_messages`.

A thread for each asker reads the files and writes the pieces through a transport of its own. The
threads have a low priority and hold no lock while they read, hash and copy a piece, so the step
loop does not wait for them. Tensors come from the files, not from the engine, which may have packed
them: an asker may use another device or other kernels, and rounds the weights in its own way.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from checkpoint.gguf.folder import SUFFIX
from engine.checkpoint.files import (
    TensorEntry,
    model_fingerprint,
    read_all_entries,
    weight_files,
)
from kv_transfer.authentication import verify_descriptor
from kv_transfer.staging import StagingPool
from kv_transfer.transports.interface import PeerLost, PeerReady, Transport, WriteDone
from process.sockets.control import Peer
from protocol.errors import ModelLoadError, ProtocolError, TransferError
from protocol.message_base import Message
from protocol.weight_messages import (
    WeightsAsk,
    WeightsClose,
    WeightsGrant,
    WeightsMessage,
    WeightsOffer,
    WeightsRefused,
)
from worker.weights.tensor_stream import TensorStream

log = logging.getLogger(__name__)

MOST_AT_ONCE = 4
"""The most transfers at once; further askers are refused and go elsewhere."""
_MOST_BLOCK_BYTES = 16 << 20
_MOST_BLOCKS = 64
_POLL_S = 200e-6
_CLOSE_S = 10.0
_NICENESS = 10
"""The niceness of the threads, with which they get a tenth of a busy core. With less CPU, a thread
that is suspended while it holds the interpreter's lock would delay the step loop."""


@dataclass(frozen=True)
class ServedModel:
    """The checkpoint in `folder` that this worker has loaded and serves."""

    folder: Path
    fingerprint: str


@dataclass(frozen=True)
class TransferMeans:
    """The cluster's secret, the transport's name, a function that opens a transport, and how long
    to wait for the other side."""

    secret: bytes
    transport: str
    open: Callable[[], Transport]
    patience_s: float


class WeightsServer:
    """Owns the threads. `handle`, `take_answers` and `close` belong to the loop's thread."""

    def __init__(self, model: ServedModel, means: TransferMeans, wake: Callable[[], None]) -> None:
        """`wake` is called by other threads when there are answers to send."""
        self._model = model
        self._means = means
        self._wake = wake
        self._answers: SimpleQueue[tuple[Peer, Message]] = SimpleQueue()
        self._transfers: dict[tuple[bytes, str], _Transfer] = {}

    def handle(self, peer: Peer, message: WeightsMessage) -> None:
        """Handle a message of an asker."""
        self._transfers = {
            key: each for key, each in self._transfers.items() if each.thread.is_alive()
        }
        key = (peer.identity, message.ask)
        if isinstance(message, WeightsAsk):
            self._begin(peer, message)
        elif key in self._transfers:
            self._transfers[key].messages.put(message)

    def take_answers(self) -> list[tuple[Peer, Message]]:
        """The messages to send to askers."""
        taken = []
        while True:
            try:
                taken.append(self._answers.get_nowait())
            except Empty:
                return taken

    def close(self) -> None:
        """End all transfers."""
        for transfer in self._transfers.values():
            transfer.messages.put(WeightsClose(ask=transfer.ask.ask))
        for transfer in self._transfers.values():
            transfer.thread.join(_CLOSE_S)
        self._transfers.clear()

    def _begin(self, peer: Peer, ask: WeightsAsk) -> None:
        def answer(message: Message) -> None:
            self._answers.put((peer, message))
            self._wake()

        if reason := self._why_not(ask):
            answer(WeightsRefused(ask=ask.ask, reason=reason))
            return
        log.info("%s %s asks for the weights", peer.role.value, peer.name)
        transfer = _Transfer(peer.name, ask, self._model, self._means, answer)
        self._transfers[peer.identity, ask.ask] = transfer
        transfer.thread.start()

    def _why_not(self, ask: WeightsAsk) -> str:
        pool, means = ask.pool, self._means
        if len(self._transfers) >= MOST_AT_ONCE:
            return f"it sends its weights to {len(self._transfers)} others"
        if pool.transport != means.transport:
            return f"its transport is {means.transport}, not {pool.transport}"
        if not (0 < pool.num_blocks <= _MOST_BLOCKS and 0 < ask.block_bytes <= _MOST_BLOCK_BYTES):
            return f"a pool of {pool.num_blocks} blocks of {ask.block_bytes} bytes is none for it"
        try:
            verify_descriptor(
                means.secret, pool.agent, pool.descriptor, pool.num_blocks, pool.digest
            )
        except ProtocolError as error:
            return str(error)
        return ""


class _Transfer:
    """One asker's transfer, and its thread."""

    def __init__(
        self,
        asker: str,
        ask: WeightsAsk,
        model: ServedModel,
        means: TransferMeans,
        answer: Callable[[Message], None],
    ) -> None:
        self.ask = ask
        self.messages: SimpleQueue[WeightsGrant | WeightsClose] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="baton-weights", daemon=True)
        self._asker = asker
        self._model = model
        self._means = means
        self._answer = answer
        self._num_granted = 0
        self._is_closed = False

    def _run(self) -> None:
        _lower_priority()
        try:
            stream = TensorStream(_tensors_of(self._model))
            self._serve(stream)
        except (TransferError, ModelLoadError, OSError) as error:
            log.warning("the weights do not go to %s: %s", self._asker, error)
            self._answer(WeightsRefused(ask=self.ask.ask, reason=str(error)))
        except Exception:
            log.exception("the weights do not go to %s", self._asker)
            self._answer(WeightsRefused(ask=self.ask.ask, reason="an error of its own"))

    def _serve(self, stream: TensorStream) -> None:
        target = self.ask.pool
        pool = StagingPool(self._means.open, self.ask.block_bytes, target.num_blocks)
        try:
            pool.transport.add_peer(target.agent, target.descriptor, target.num_blocks)
            self._answer(
                WeightsOffer(
                    ask=self.ask.ask,
                    fingerprint=self._model.fingerprint,
                    tensors=stream.tensors,
                )
            )
            self._send(stream, pool)
        finally:
            stream.close()
            pool.close()

    def _send(self, stream: TensorStream, pool: StagingPool) -> None:
        """Write pieces as they are granted, until the asker closes the transfer. Raises
        TransferError if the asker is gone or silent."""
        num_pieces = -(-stream.num_bytes // pool.block_bytes)
        num_sent, is_ready = 0, False
        busy: dict[int, int] = {}  # the block that a write reads, by the write's handle
        deadline = time.monotonic() + self._means.patience_s
        while True:
            has_news = self._receive(_POLL_S if busy or not is_ready else _POLL_S * 50)
            if self._is_closed:
                return
            for event in pool.transport.poll():
                match event:
                    case PeerReady():
                        is_ready = True
                    case PeerLost(reason=reason):
                        raise TransferError(reason)
                    case WriteDone(handle=handle, error=error):
                        if error is not None:
                            raise TransferError(error)
                        del busy[handle]
                has_news = True
            block = num_sent % pool.num_blocks
            may_send = is_ready and num_sent < min(self._num_granted, num_pieces)
            if may_send and block not in busy.values():
                stream.read_into(pool.block(block))
                name = num_sent.to_bytes(8, "little")
                agent = self.ask.pool.agent
                busy[pool.transport.post_write(agent, [block], [block], name)] = block
                num_sent, has_news = num_sent + 1, True
            if has_news:
                deadline = time.monotonic() + self._means.patience_s
            elif time.monotonic() >= deadline:
                raise TransferError(f"it has been silent for {self._means.patience_s:g} s")

    def _receive(self, wait_s: float) -> bool:
        """Take the asker's messages; if there are none, wait up to `wait_s` for one. Returns
        whether there was one."""
        has_some = False
        try:
            while True:
                message = self.messages.get(timeout=0 if has_some else wait_s)
                has_some = True
                if isinstance(message, WeightsClose):
                    self._is_closed = True
                else:
                    self._num_granted = max(self._num_granted, message.num_pieces)
        except Empty:
            return has_some


def _tensors_of(model: ServedModel) -> dict[str, TensorEntry]:
    """The stored tensors in the order of sending. Raises ModelLoadError."""
    files = weight_files(model.folder)
    if any(file.suffix == SUFFIX for file in files):
        raise ModelLoadError("a GGUF file, which holds configuration and weights, is not sent")
    if model_fingerprint(model.folder) != model.fingerprint:
        raise ModelLoadError("its checkpoint has changed since it was loaded")
    entries = read_all_entries(model.folder).items()
    return dict(sorted(entries, key=lambda item: (item[1].file, item[1].begin)))


def _lower_priority() -> None:
    """Let this thread yield to the step loop, where threads have priorities of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
