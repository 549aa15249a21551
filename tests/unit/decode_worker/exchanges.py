"""Requests of a router and messages of a prefill worker to a decode worker, and its answers."""

from __future__ import annotations

from typing import Any

import msgspec

from kv_transfer.transfer_loop import NotificationArrived
from protocol.handoff_messages import HandoffToken, KvGrant, KvWritten
from protocol.messages import (
    Generate,
    KvPeer,
    StepTokens,
)
from protocol.wire import encode
from tests.sequences import greedy
from tests.unit.fake_model import BLOCK, continuation
from tests.unit.worker_harness import ROUTER, DecodeBench

PEER = KvPeer(worker_id="p", incarnation="p-i", control="inproc://p")
PROMPT = list(range(10))
LOCAL = Generate(
    request_id="r", attempt=1, token_ids=PROMPT, num_output=0, sampling=greedy(4), deadline_ms=9000
)
REMOTE = msgspec.structs.replace(LOCAL, prefill=PEER)


def say(d: DecodeBench, *messages: Any, turns: int = 1) -> list[Any]:
    """Messages from the router, turns of the loop, and what was answered."""
    d.server.inbox += [(ROUTER, message) for message in messages]
    return turn(d, turns)


def turn(d: DecodeBench, turns: int = 1) -> list[Any]:
    for _ in range(turns):
        d.worker.turn()
    return d.take_sent()


def tokens_of(messages: list[Any]) -> list[int]:
    steps = [message for message in messages if isinstance(message, StepTokens)]
    return [token for step in steps for each in step.sequences for token in each.token_ids]


def first_token(**changes: Any) -> HandoffToken:
    token = HandoffToken(
        request_id="r",
        attempt=1,
        index=0,
        token_id=continuation(PROMPT, 1)[0],
        cached_tokens=0,
        last_chunk_end_us=1,
    )
    return msgspec.structs.replace(token, **changes)


def deliver_blocks(d: DecodeBench) -> None:
    """All granted blocks arrive, with the prompt's contents."""
    deliver(d, next(m for _, m in d.peers.sent if isinstance(m, KvGrant)))


def deliver(d: DecodeBench, grant: KvGrant) -> None:
    for index, block in enumerate(grant.block_ids, grant.first_block):
        part = PROMPT[index * BLOCK : (index + 1) * BLOCK]
        d.memory[block, : len(part)] = d.memory.new_tensor(part)
    written = KvWritten(
        request_id="r",
        attempt=grant.attempt,
        first_block=grant.first_block,
        num_blocks=len(grant.block_ids),
    )
    d.transfers.events.append(NotificationArrived("agent of p", encode(written)))
