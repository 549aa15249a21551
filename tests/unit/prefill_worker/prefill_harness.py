"""What a router and a decode worker say to a prefill worker under test, and what it answers."""

from __future__ import annotations

from typing import Any

import msgspec

from process.sockets.control import Peer
from protocol.handoff_messages import KvAsk, KvGrant
from protocol.messages import Prefill
from tests.sequences import greedy
from tests.unit.worker_harness import ROUTER, DecodeBench, PrefillBench, finish

PROMPT = list(range(18))
PREFILL = Prefill(
    request_id="r", attempt=1, token_ids=PROMPT, num_output=0, sampling=greedy(4), deadline_ms=9000
)


def ask(d: DecodeBench, **changes: Any) -> KvAsk:
    """The decode worker waits for the prompt."""
    message = KvAsk(request_id="r", attempt=1, agent=d.transfers.agent, ttl_ms=3000)
    return msgspec.structs.replace(message, **changes)


def grant(d: DecodeBench, num_blocks: int = 5, **changes: Any) -> KvGrant:
    """A grant of the first blocks of the decode worker's pool. `changes` replace its fields."""
    message = KvGrant(
        request_id="r",
        attempt=1,
        agent=d.transfers.agent,
        first_block=0,
        block_ids=list(range(num_blocks)),
        ttl_ms=3000,
    )
    return msgspec.structs.replace(message, **changes)


def say(p: PrefillBench, *messages: Any, turns: int = 1) -> list[Any]:
    """Let a router send messages. Returns all that the worker sent by the end of the turns."""
    p.server.inbox += [(ROUTER, message) for message in messages]
    for _ in range(turns):
        p.worker.turn()
    return p.take_sent()


def say_of_d(p: PrefillBench, d: DecodeBench, *messages: Any, turns: int = 1) -> list[Any]:
    """Let the decode worker send messages. Returns all that the worker sent by the end of the
    turns."""
    p.server.inbox += [(d.as_peer, message) for message in messages]
    return say(p, turns=turns)


def finish_writes(p: PrefillBench) -> None:
    """Let all writes that are under way land."""
    for write in list(p.transfers.writes):
        finish(write, p)


def types(messages: list[Any]) -> list[type]:
    """The type of each message."""
    return [type(message) for message in messages]


def answered(p: PrefillBench) -> list[tuple[Peer, type]]:
    """The messages to peers other than routers since the last call, as (peer, type)."""
    sent = [(peer, type(message)) for peer, message in p.server.sent if peer != ROUTER]
    p.server.sent.clear()
    return sent
