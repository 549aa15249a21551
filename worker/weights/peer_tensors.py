"""The checkpoint of another worker, received piece by piece (see `WeightsOffer` in
`protocol.weight_messages`).

Owns the connection, and the small pool in which the pieces arrive. No byte of a tensor is used
before its digest has been compared. The main thread calls everything while the model loads.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from engine.checkpoint.files import TensorEntry
from engine.checkpoint.stored_tensors import stored_form
from kv_transfer.authentication import authenticate_descriptor
from kv_transfer.staging import StagingPool
from kv_transfer.transports.interface import Notification
from process.process_watch import WatchedProcess, machine_name
from process.sockets.control import ControlLink
from process.sockets.encrypted_sockets import Network
from protocol.errors import ProtocolError, TransferError
from protocol.handoff_messages import PeerDescriptor
from protocol.messages import PROTOCOL_VERSION, Hello, Role
from protocol.registration import WorkerInfo
from protocol.weight_messages import (
    WeightsAsk,
    WeightsClose,
    WeightsGrant,
    WeightsOffer,
    WeightsRefused,
)
from worker.weights.server import TransferMeans
from worker.weights.tensor_stream import DIGEST_BYTES

log = logging.getLogger(__name__)

BLOCK_BYTES = 2 << 20
NUM_BLOCKS = 16
MAX_SKIPPED_BYTES = 64 << 30
"""The most bytes that may lie between the tensors of our model."""
_GRANTS_PER_ROUND = 4
"""Grants for each filling of the pool; the peer's loop reads a message for each."""
_POLL_S = 200e-6
_LOOK_S = 0.05
"""Seconds between two checks whether the worker's process has ended."""
_LINGER_MS = 1000
_PIECE_BYTES = 8
T = TypeVar("T")


@dataclass(frozen=True)
class Asker:
    """Our name and role, and the cluster's secret."""

    name: str
    role: Role
    secret: str

    def hello(self) -> Hello:
        """Our Hello, without fingerprints, which are not known yet."""
        return Hello(
            sender=self.name,
            role=self.role,
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint="",
            layout_fingerprint="",
        )


class PeerTensors:
    """The peer's `StoredTensors`, available once `open` has returned."""

    def __init__(
        self,
        info: WorkerInfo,
        asker: Asker,
        means: TransferMeans,
        block_bytes: int = BLOCK_BYTES,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.where = f"worker {info.worker_id}"
        self.entries: dict[str, TensorEntry] = {}
        self.fingerprint = ""
        self.is_finished = False
        self.took_s = 0.0
        self._control = info.control
        is_near = info.machine and info.machine == machine_name()
        self._process = WatchedProcess(info.pid) if is_near else None
        self._asker = asker
        self._means = means
        self._blocks = (block_bytes, num_blocks)
        self._ask = secrets.token_hex(16)
        self._network: Network | None = None
        self._link: ControlLink | None = None
        self._pool: StagingPool | None = None
        self._offer: WeightsOffer | None = None
        self._arrived: set[int] = set()  # pieces that have arrived and have not been read
        # The next byte's piece, its offset in the piece, and its offset in the whole stream.
        self._piece = self._offset = self._at = 0
        self._end = 0
        self._num_skipped = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that have been read or skipped."""
        return self._at

    def open(self) -> PeerTensors:
        """Ask the worker. Raises TransferError if the worker does not answer, refuses, or offers
        what cannot be a checkpoint."""
        self.took_s = -time.monotonic()
        self._connect()
        offer = self._wait(lambda: self._offer)
        self.fingerprint = offer.fingerprint
        for each in offer.tensors:
            if each.name in self.entries:
                raise TransferError(f"it offers tensor {each.name!r} twice")
            begin = self._end
            end = begin + each.num_bytes
            self.entries[each.name] = TensorEntry(
                Path(self.where), each.dtype, each.shape, begin, end
            )
            self._end = end + DIGEST_BYTES
        return self

    def read(self, name: str) -> torch.Tensor:
        """See `StoredTensors`. Raises TransferError if the worker is gone, or if the bytes differ
        from those that the worker has read."""
        entry = self.entries[name]
        dtype, shape = stored_form(name, entry)
        self._skip(entry.begin - self._at)
        stored = torch.empty(entry.num_bytes, dtype=torch.uint8)
        view: memoryview = stored.numpy().data
        self._fill(view)
        expected = bytearray(DIGEST_BYTES)
        self._fill(memoryview(expected))
        if hashlib.sha256(view).digest() != expected:
            raise TransferError(f"tensor {name!r} has another digest here than at {self.where}")
        return stored.view(dtype).view(shape)

    def panel_rows(self, name: str, pairs_of_heads: int | None) -> None:
        """See `StoredTensors`; quantized weights are not sent."""

    def finish(self) -> None:
        """Skip the remaining bytes, so that the worker writes nothing any more, and close. All
        wanted tensors are here, so errors are ignored."""
        self.is_finished = True
        with contextlib.suppress(TransferError):
            self._skip(self._end - self._at)
            self.release()
        self.hang_up()
        self.took_s += time.monotonic()

    def hang_up(self) -> None:
        """End the connection, but keep the pool: the worker may still write. A second call does
        nothing."""
        if self._link is not None:
            self._link.send(WeightsClose(ask=self._ask))
            self._link.close(_LINGER_MS)
            self._link = None
        if self._network is not None:
            self._network.close(_LINGER_MS)
            self._network = None

    def release(self) -> None:
        """Close the pool; the worker must have stopped writing. A second call does nothing."""
        if self._pool is not None:
            self._pool.close()

    def _connect(self) -> None:
        self._network = Network(self._asker.secret)
        try:
            self._link = ControlLink(self._network, self._control, self._asker.hello())
        except ProtocolError as error:
            raise TransferError(str(error)) from error
        self._pool = StagingPool(self._means.open, *self._blocks)
        transport, (block_bytes, num_blocks) = self._pool.transport, self._blocks
        agent, descriptor = transport.agent, transport.descriptor()
        digest = authenticate_descriptor(self._means.secret, agent, descriptor, num_blocks)
        pool = PeerDescriptor(
            transport=self._means.transport,
            agent=agent,
            descriptor=descriptor,
            digest=digest,
            num_blocks=num_blocks,
        )
        self._link.send(WeightsAsk(ask=self._ask, pool=pool, block_bytes=block_bytes))
        self._grant()

    # -- bytes, in the order of the stream ---------------------------------------------------

    def _skip(self, num_bytes: int) -> None:
        assert num_bytes >= 0, "tensors are read in the order of their places"
        self._num_skipped += num_bytes
        if self._num_skipped > MAX_SKIPPED_BYTES:
            raise TransferError(f"it has {self._num_skipped} bytes that this model does not use")
        while num_bytes:
            num_bytes -= len(self._next(num_bytes))

    def _fill(self, place: memoryview) -> None:
        filled = 0
        while filled < len(place):
            found = self._next(len(place) - filled)
            place[filled : filled + len(found)] = found
            filled += len(found)

    def _next(self, most: int) -> memoryview:
        """The next bytes, `most` at most; valid until the next call."""
        assert self._pool is not None
        if self._offset == self._pool.block_bytes:
            self._arrived.discard(self._piece)
            self._piece, self._offset = self._piece + 1, 0
            if self._piece % max(1, self._pool.num_blocks // _GRANTS_PER_ROUND) == 0:
                self._grant()
        self._wait(lambda: self._piece in self._arrived)
        block = self._pool.block(self._piece % self._pool.num_blocks)
        found = block[self._offset : self._offset + most]
        self._offset += len(found)
        self._at += len(found)
        return found

    def _grant(self) -> None:
        assert self._link is not None
        num_pieces = self._piece + self._blocks[1]
        self._link.send(WeightsGrant(ask=self._ask, num_pieces=num_pieces))

    # -- news --------------------------------------------------------------------------------

    def _wait(self, check: Callable[[], T | None]) -> T:
        """The first truthy result of `check`. Raises TransferError if the
        worker refuses, is known to have ended, or makes no progress for too long."""
        patience_s = self._means.patience_s
        deadline, next_look = time.monotonic() + patience_s, time.monotonic() + _LOOK_S
        while not (result := check()):
            if self._has_news():
                deadline = time.monotonic() + patience_s
            elif time.monotonic() >= deadline:
                raise TransferError(f"nothing has come from it for {patience_s:g} s")
            elif self._process is not None and time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_S
                if self._process.has_ended():
                    raise TransferError("its process has ended")
            else:
                time.sleep(_POLL_S)
        return result

    def _has_news(self) -> bool:
        """Process received messages and events. Returns whether one of them is progress: the offer,
        or another piece. Raises TransferError if the worker refuses, or claims a piece that it may
        not write."""
        assert self._link is not None
        assert self._pool is not None
        has_news = False
        self._link.tick(time.monotonic())
        for event in self._pool.transport.poll():
            if isinstance(event, Notification):
                piece = int.from_bytes(event.payload[:_PIECE_BYTES], "little")
                if not self._piece <= piece < self._piece + self._blocks[1]:
                    raise TransferError("it claims to have written a piece that was not granted")
                has_news = has_news or piece not in self._arrived
                self._arrived.add(piece)
        for message in self._link.receive():
            if isinstance(message, WeightsRefused) and message.ask == self._ask:
                raise TransferError(message.reason)
            is_first = self._offer is None
            if is_first and isinstance(message, WeightsOffer) and message.ask == self._ask:
                self._offer, has_news = message, True
        if refused := self._link.refused:
            raise TransferError(f"its {refused.what} is {refused.ours}, ours is {refused.theirs}")
        return has_news
