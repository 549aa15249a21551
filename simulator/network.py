"""Links between simulated workers: each worker's network card shares its bandwidth equally among
its flows, in either direction. A flow runs at the smaller of the shares that its two cards give
it."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.event_queue import Action, EventQueue


@dataclass(eq=False, slots=True)
class _Flow:
    source: int
    sink: int
    left: float
    done: Action
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


@dataclass(slots=True)
class _Card:
    """The flows of a worker; dicts keep their order."""

    sends: dict[_Flow, None] = field(default_factory=dict)
    receives: dict[_Flow, None] = field(default_factory=dict)


class Network:
    """The flows under way among workers, by their numbers."""

    def __init__(self, queue: EventQueue, bytes_per_s: list[float], latency_s: float) -> None:
        self.latency_s = latency_s
        self._queue = queue
        self._bytes_per_s = bytes_per_s
        self._cards = [_Card() for _ in bytes_per_s]

    def send(self, source: int, sink: int, num_bytes: float, done: Action) -> None:
        """Move bytes; `done()` is called when the last one has arrived."""
        flow = _Flow(source, sink, num_bytes, done, since=self._queue.now)
        self._cards[source].sends[flow] = None
        self._cards[sink].receives[flow] = None
        self._share(flow)

    def _end(self, flow: _Flow, version: int) -> None:
        if flow.version != version:
            return
        del self._cards[flow.source].sends[flow]
        del self._cards[flow.sink].receives[flow]
        self._share(flow)
        self._queue.at(self._queue.now + self.latency_s, flow.done)

    def _share(self, changed: _Flow) -> None:
        """Update the flows that share a card with a flow that began or ended."""
        sends, receives = self._cards[changed.source].sends, self._cards[changed.sink].receives
        now = self._queue.now
        for flow in (*sends, *(each for each in receives if each.source != changed.source)):
            rate = min(
                self._bytes_per_s[flow.source] / len(self._cards[flow.source].sends),
                self._bytes_per_s[flow.sink] / len(self._cards[flow.sink].receives),
            )
            if rate == flow.rate:
                continue
            flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
            flow.rate, flow.since = rate, now
            flow.version += 1
            self._queue.at(now + flow.left / rate, self._end, flow, flow.version)
