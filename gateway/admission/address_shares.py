"""How the places of a router without keys are divided among the addresses of its clients.

While one address asks alone, as a proxy does for all clients behind it, it may have every place.
Otherwise an address may hold 8 times as many places as it leaves free, so there is room for others
(dynamic thresholds: Choudhury and Hahne, 1998). An address that holds none may take any free place.
Pure; reads no clock.
"""

from __future__ import annotations

ALONE_AFTER_S = 600.0
"""An address counts as alone if no other has asked for this time."""
TIMES_FREE = 8


class AddressShares:
    """Places held, by address. An empty address stands for requests without a client."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}  # no value is 0
        self._asked: dict[str, float] = {}  # when the last two addresses asked, the latest last

    def note(self, address: str, now: float) -> None:
        """Note that the address asks for a place, whether or not it gets one."""
        self._asked.pop(address, None)
        self._asked[address] = now
        if len(self._asked) > 2:
            del self._asked[next(iter(self._asked))]

    def is_too_much(self, address: str, num: int, free: int, now: float) -> bool:
        """Whether `num` more of the `free` places are too many for the address."""
        held = self.held(address)
        if held == 0 or held + num <= TIMES_FREE * (free - num):
            return False
        return any(
            other != address and now - asked_at <= ALONE_AFTER_S
            for other, asked_at in self._asked.items()
        )

    def held(self, address: str) -> int:
        """The places that an address holds."""
        return self._held.get(address, 0)

    def take(self, address: str, num: int) -> None:
        """Note that the address holds `num` more places."""
        self._held[address] = self._held.get(address, 0) + num

    def give_back(self, address: str, num: int) -> None:
        """Note that the address holds `num` fewer places."""
        left = self._held.pop(address) - num
        if left:
            self._held[address] = left
