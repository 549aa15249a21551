"""Which other routers are alive, which have fallen silent, and since when. A live router changes
its summary every few seconds; one that leaves in order removes it. A summary that stays the same
for `SILENT_AFTER_S` belongs to a router that was killed or hangs. It counts as silent for an hour,
until it changes its summary again, or until a router that came later takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from console.doctor.facts import RouterFacts

SILENT_AFTER_S = 6.0
KEPT_US = 3_600_000_000


@dataclass
class _Peer:
    body: bytes
    first_us: int
    heard_us: int


class RouterPresence:
    """Follows the summaries of the other routers. `names` has the routers' names, by id."""

    def __init__(self, wall_us: Callable[[], int]) -> None:
        self.names: dict[str, str] = {}
        self._wall_us = wall_us
        self._peers: dict[str, _Peer] = {}
        self._silent: dict[str, int] = {}

    def take(self, bodies: Mapping[str, bytes]) -> None:
        """Take the summaries that the store has now. `bodies` is empty while the store is away."""
        now_us = self._wall_us()
        for router_id, body in bodies.items():
            peer = self._peers.setdefault(router_id, _Peer(body, now_us, now_us))
            if peer.body != body:
                peer.body, peer.heard_us = body, now_us
                self._silent.pop(router_id, None)
            elif now_us - peer.heard_us >= SILENT_AFTER_S * 1e6:
                self._silent.setdefault(router_id, peer.heard_us)
        for gone in self._peers.keys() - bodies.keys():
            del self._peers[gone]
        self._silent = {k: at for k, at in self._silent.items() if at > now_us - KEPT_US}
        known = self._peers.keys() | self._silent.keys()
        self.names = {k: name for k, name in self.names.items() if k in known}

    def missed(self) -> tuple[RouterFacts, ...]:
        """The silent routers whose place no later one has taken."""
        newcomers = sorted(e.first_us for k, e in self._peers.items() if k not in self._silent)
        found = []
        for router_id, since_us in sorted(self._silent.items(), key=lambda each: each[1]):
            later = next((at for at in newcomers if at > since_us), None)
            if later is not None:
                newcomers.remove(later)
                continue
            name = self.names.get(router_id) or f"router {router_id}"
            found.append(RouterFacts(name=name, since_us=since_us))
        return tuple(found)

    def serving(self) -> list[str]:
        """The names of the other routers that are alive."""
        ids = self._peers.keys() - self._silent.keys()
        return sorted(self.names.get(each) or f"router {each}" for each in ids)
