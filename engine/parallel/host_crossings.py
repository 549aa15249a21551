"""Sums and hidden states of stages whose ranks lie on several hosts.

On each host the ranks of a stage meet as on a single host. Between hosts, only the first rank of
each host sends and receives; it then shares the result with the other ranks of its host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.layers.summed import Sums
from engine.parallel.host_mesh import HostMesh


class CrossingSums:
    """The sums of a stage on several hosts: in fp32, in the order of hosts, so that all ranks have
    equal bits. Methods raise RankLost."""

    address: int | None = None

    def __init__(self, local: Sums, mesh: HostMesh, firsts: Sequence[int], number: int) -> None:
        """`local` are the sums of this host's ranks of the stage. `firsts` are the first ranks of
        the stage on each host, by their numbers among all of the worker; `number` is our own."""
        self._local = local
        self._mesh = mesh
        self._firsts = firsts
        self._others = [each for each in firsts if each != number]
        self._own = number
        self._per_host = firsts[1] - firsts[0]
        self._waited_ns = 0
        self.rank = number - firsts[0]

    @property
    def waited_ns(self) -> int:
        """See Sums."""
        return self._local.waited_ns + self._waited_ns

    def add_up(self, part: torch.Tensor) -> None:
        """See Sums."""
        self._local.add_up(part)
        if self._leads_host:
            part.copy_(self._added(part.to(torch.float32, copy=True)))
        self._local.share(part)

    def share(self, x: torch.Tensor) -> None:
        """See Sums."""
        if self._own == self._firsts[0]:
            copy = x.clone()
            for other in self._others:
                self._waited_ns += self._mesh.send(copy, other)
        elif self._leads_host:
            self._waited_ns += self._mesh.receive(x, self._firsts[0])
        self._local.share(x)

    def gather(self, part: torch.Tensor, bounds: Sequence[int], whole: torch.Tensor | None) -> None:
        """See Sums."""
        size = self._per_host
        spans = [bounds[at : at + size + 1] for at in range(0, len(bounds) - 1, size)]
        span = spans[self.rank // size]
        own = [each - span[0] for each in span]
        rows = part.new_empty((len(part), own[-1])) if self._leads_host else None
        self._local.gather(part, own, rows)
        if rows is None:
            return
        if whole is None:
            self._waited_ns += self._mesh.send(rows, self._firsts[0])
            return
        whole[:, span[0] : span[-1]] = rows
        for first, columns in zip(self._firsts[1:], spans[1:], strict=True):
            theirs = part.new_empty((len(part), columns[-1] - columns[0]))
            self._waited_ns += self._mesh.receive(theirs, first)
            whole[:, columns[0] : columns[-1]] = theirs

    def meet(self) -> None:
        """See Sums."""
        self.add_up(torch.zeros(1))

    def check(self) -> None:
        """See Sums."""
        self._local.check()

    @property
    def _leads_host(self) -> bool:
        return self._own in self._firsts

    def _added(self, own: torch.Tensor) -> torch.Tensor:
        for other in self._others:
            self._waited_ns += self._mesh.send(own, other)
        total = torch.zeros_like(own)
        for first in self._firsts:
            theirs = own
            if first != self._own:
                theirs = torch.empty_like(own)
                self._waited_ns += self._mesh.receive(theirs, first)
            total += theirs
        return total


class CrossingStates:
    """One end of the link between two stages on different hosts; see `StageLink`. The first rank of
    a stage sends to the first rank of the next stage on each of its hosts."""

    def __init__(self, mesh: HostMesh, peers: Sequence[int], local: Sums | None = None) -> None:
        """`peers` are those first ranks for the sender, and the sender for those that receive, who
        share with the other ranks of `local`."""
        self._mesh = mesh
        self._peers = peers
        self._local = local
        self._waited_ns = 0

    @property
    def waited_ns(self) -> int:
        """The time for which this end has waited for the other so far."""
        return self._waited_ns

    def send(self, x: torch.Tensor) -> None:
        """Send hidden states. Raises RankLost."""
        copy = x.clone()
        for rank in self._peers:
            self._waited_ns += self._mesh.send(copy, rank)

    def receive(self, x: torch.Tensor) -> None:
        """Receive hidden states of this shape and type into `x`. Raises RankLost."""
        for rank in self._peers:
            self._waited_ns += self._mesh.receive(x, rank)
        if self._local is not None:
            self._local.share(x)
