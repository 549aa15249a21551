"""Tensors between ranks on several hosts, by gloo, whose sockets are bound to one address.

The addresses of these sockets travel over the ranks' links, which are authenticated and encrypted
between hosts. gloo's own connections are neither: anyone who reaches such a socket can disturb the
sums. So only the worker's own hosts may reach the interface.
"""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from engine.parallel.sums import RankLost
from protocol.errors import ConfigError

Exchange = Callable[[bytes], Sequence[bytes]]
"""Gives every rank what each rank has given; all ranks call it together. Raises RankLost."""
_CONNECT_S = 60.0
_SENT_AHEAD = 2
"""Tensors that may be on their way to a rank, so that a stage need not wait for the next one."""


class HostMesh:
    """Connections between all ranks of a worker. Each pair of ranks sends and receives in one
    order. `limit_s`: how long a rank waits for another. `name_of` names a rank in errors. Methods
    raise RankLost."""

    def __init__(
        self,
        address: str,
        number: int,
        num_ranks: int,
        exchange: Exchange,
        limit_s: float,
        name_of: Callable[[int], str] = "rank {}".format,
    ) -> None:
        """Connect this rank, `number` of `num_ranks`, on its host's `address`; all ranks do so
        together. Raises ConfigError if the address is not this host's, and RankLost."""
        self._limit_s = limit_s
        self._name_of = name_of
        self._sent: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = {}
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=_CONNECT_S)
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        except RuntimeError as error:
            raise ConfigError(f"gloo cannot listen on {address}: {_first_line(error)}") from error
        store = _ExchangedStore(exchange)
        try:
            self._group: Any = dist.ProcessGroupGloo(store, number, num_ranks, options)
        except RuntimeError as error:
            if store.error is not None:
                raise store.error from error
            line = f"the ranks cannot connect from {address}: {_first_line(error)}"
            raise RankLost(line) from error

    def send(self, x: torch.Tensor, rank: int) -> int:
        """Begin to send a tensor, which must not change any more. Waits until at most two are on
        their way to this rank; returns the nanoseconds waited."""
        sent = self._sent.setdefault(rank, deque())
        if x.numel():
            data = _bytes_of(x)
            sent.append((self._try(rank, lambda: self._group.send([data], rank, 0)), data))
        waited_ns = 0
        while len(sent) > _SENT_AHEAD:
            waited_ns += self._wait(rank, sent.popleft()[0])
        return waited_ns

    def receive(self, x: torch.Tensor, rank: int) -> int:
        """Receive a tensor of this shape and type into `x`, contiguous; returns the nanoseconds
        waited."""
        if not x.numel():
            return 0
        data = _bytes_of(x)
        return self._wait(rank, self._try(rank, lambda: self._group.recv([data], rank, 0)))

    def _try(self, rank: int, begin: Callable[[], dist.Work]) -> dist.Work:
        try:
            return begin()
        except RuntimeError as error:
            raise self._lost(rank, error) from error

    def _wait(self, rank: int, work: dist.Work) -> int:
        started = time.perf_counter_ns()
        try:
            work.wait(datetime.timedelta(seconds=self._limit_s))
        except RuntimeError as error:
            raise self._lost(rank, error) from error
        return time.perf_counter_ns() - started

    def _lost(self, rank: int, error: RuntimeError) -> RankLost:
        if "Timed out" in str(error):
            return RankLost(f"{self._name_of(rank)} has not answered for {self._limit_s:g} s")
        return RankLost(f"{self._name_of(rank)} is gone: {_first_line(error)}")


class _ExchangedStore(dist.Store):
    """The store in which gloo puts this rank's addresses, and finds those of other ranks. Ranks
    exchange everything that they have put here when gloo first asks for another rank's address."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.error: RankLost | None = None
        self._exchange = exchange
        self._values: dict[str, bytes] = {}
        self._is_exchanged = False

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """See Store, whose stub is wrong: gloo gives bytes."""
        self._values[key] = value

    def get(self, key: str) -> bytes:
        """See Store."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """See Store; exchanges once."""
        if not self._is_exchanged and any(key not in self._values for key in keys):
            self._is_exchanged = True
            try:
                answers = self._exchange(msgspec.msgpack.encode(self._values))
            except RankLost as error:
                self.error = error
                raise
            for each in answers:
                self._values |= msgspec.msgpack.decode(each, type=dict[str, bytes])
        missing = [key for key in keys if key not in self._values]
        if missing:
            raise RuntimeError(f"no rank has reported {', '.join(missing)}")


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous()
    return x.view(-1).view(torch.uint8)


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [""])[0].rpartition("] ")[2]
