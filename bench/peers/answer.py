"""The loop of a peer's script: one JSON line in, one JSON line out.

Needs only Python and no part of Baton: it runs in the peer's own environment, beside the script
that imports it. The peer's own output goes to standard error.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Peer(Protocol):
    """An engine with one checkpoint loaded."""

    version: str
    vocab_size: int

    def prefill(self, prompt: list[int]) -> float:
        """Seconds until the first token after `prompt` is chosen."""

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Seconds of `steps` greedy steps of all prompts together, without their prefill."""


@runtime_checkable
class Reader(Protocol):
    """A peer that also predicts a given text."""

    def loss(self, window: list[int]) -> float:
        """The negative log-likelihood in nats, summed over the tokens after the first, each
        predicted from those before it."""


class Needs(NamedTuple):
    """The needs that the peer is started for; see EngineNeeds in bench/engine/workloads.py."""

    folder: str
    dtype: str
    threads: int
    max_context: int
    max_sequences: int
    num_tokens: int
    kv_bytes_per_token: int
    step_tokens: int
    kv_gib: int


def answer(kind: Callable[[Needs], Peer]) -> None:
    """Load the peer for the needs on the command line, then run the measurements that standard
    input asks for until it ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = kind(Needs(**json.loads(sys.argv[1])))
    _write_line(out, {"version": peer.version})
    for line in sys.stdin:
        asked = json.loads(line)
        _write_line(
            out, _read(peer, asked["window"]) if "window" in asked else _measure(peer, asked)
        )


def _read(peer: Peer, window: list[int]) -> dict[str, object]:
    if not isinstance(peer, Reader):
        raise SystemExit(f"{peer.version} reads no text here")
    return {"loss": peer.loss(window)}


def _measure(peer: Peer, asked: dict[str, Any]) -> dict[str, object]:
    rng = random.Random(asked["seed"])
    prompts = [
        [rng.randrange(3, peer.vocab_size) for _ in range(asked["length"])]
        for _ in range(asked["batch"])
    ]
    steps = asked["steps"]
    return {"seconds": peer.decode(prompts, steps) if steps else peer.prefill(prompts[0])}


def _write_line(out: object, document: dict[str, object]) -> None:
    print(json.dumps(document), file=out, flush=True)  # type: ignore[call-overload]
