"""A worker that sends its weights, for tests: sockets and loop of one, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.checkpoint.files import model_fingerprint
from kv_transfer.transports.registry import create_transport
from process.sockets.control import ControlServer
from process.sockets.encrypted_sockets import Network
from process.sockets.hello import HelloPolicy
from process.wakeup import Wakeup
from protocol.registration import WorkerInfo
from tests.registration import registration
from worker.weights.server import ServedModel, TransferMeans, WeightsServer

SECRET = "the secret of a test's cluster"
PATIENCE_S = 60.0


def means(transport: str = "shm", patience_s: float = PATIENCE_S) -> TransferMeans:
    return TransferMeans(
        SECRET.encode(), transport, lambda: create_transport(transport, "cpu"), patience_s
    )


class Sender:
    """A worker that sends its weights: the sockets and the loop of one, without an engine."""

    def __init__(
        self,
        folder: Path,
        by: TransferMeans,
        ignores: Callable[[Any], bool] = lambda message: False,
    ) -> None:
        self.network = Network(SECRET)
        policy = HelloPolicy("decode-1", "life-1", "fingerprint", "layout")
        self.server = ControlServer(self.network, "tcp://127.0.0.1:*", policy, 60.0)
        self.wakeup = Wakeup()
        model = ServedModel(folder, model_fingerprint(folder))
        self.weights = WeightsServer(model, by, self.wakeup.wake)
        self.taken: list[Any] = []
        self._ignores = ignores
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def info(self) -> WorkerInfo:
        return registration("decode-1", control=self.server.endpoint)

    def _run(self) -> None:
        while not self._ended.wait(0.001):
            for peer, message in self.server.receive():
                self.taken.append(message)
                if not self._ignores(message):
                    self.weights.handle(peer, message)
            for peer, message in self.weights.take_answers():
                self.server.send(peer, message)
        self.weights.close()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.server.close()
        self.network.close()
        self.wakeup.close()


@contextmanager
def sending(folder: Path, by: TransferMeans, **options: Any) -> Iterator[Sender]:
    sender = Sender(folder, by, **options)
    try:
        yield sender
    finally:
        sender.close()
