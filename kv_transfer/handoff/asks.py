"""The asks of a sink: prompts that it waits for and has granted no blocks for yet."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kv_transfer.handoff.actions import SendAsk
from kv_transfer.handoff.key import HandoffKey
from protocol.handoff_messages import KvAsk


@dataclass(slots=True)
class Ask:
    """An ask to source `peer`, which is repeated until the grant."""

    peer: str
    next_send: float
    prompt: bytes
    has_begun: bool = False


class Asks:
    """The asks by key, in the order in which they are sent next."""

    def __init__(self, agent: str, ttl_ms: int, interval_s: float) -> None:
        self._agent = agent
        self._ttl_ms = ttl_ms
        self._interval_s = interval_s
        self._asks: OrderedDict[HandoffKey, Ask] = OrderedDict()

    def __contains__(self, key: HandoffKey) -> bool:
        return key in self._asks

    def add(self, key: HandoffKey, peer: str, prompt: bytes, now: float) -> SendAsk:
        """Ask for the prompt with this digest. `due` repeats the ask."""
        ask = self._asks[key] = Ask(peer, now + self._interval_s, prompt)
        return self._send(key, ask)

    def find(self, key: HandoffKey) -> Ask | None:
        """The ask, if there is one."""
        return self._asks.get(key)

    def pop(self, key: HandoffKey) -> Ask | None:
        """Stop asking."""
        return self._asks.pop(key, None)

    def of_peer(self, peer: str) -> list[HandoffKey]:
        """The prompts that this source was asked for."""
        return [key for key, ask in self._asks.items() if ask.peer == peer]

    def due(self, now: float) -> list[SendAsk]:
        """The asks to repeat now."""
        repeated: list[SendAsk] = []
        while self._asks:
            key, ask = next(iter(self._asks.items()))
            if now < ask.next_send:
                break
            ask.next_send = now + self._interval_s
            self._asks.move_to_end(key)
            repeated.append(self._send(key, ask))
        return repeated

    def _send(self, key: HandoffKey, ask: Ask) -> SendAsk:
        message = KvAsk(
            request_id=key.request_id,
            attempt=key.attempt,
            agent=self._agent,
            ttl_ms=self._ttl_ms,
            prompt=ask.prompt,
        )
        return SendAsk(ask.peer, message)
