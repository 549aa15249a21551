"""A step's tokens on their way to the routers: one message per router and step."""

from __future__ import annotations

from collections import defaultdict

from process.sockets.control import Peer
from protocol.messages import SequenceTokens, StepTokens
from worker.host import WorkerHost


class Outbox:
    """Produced tokens that have not been sent yet; belongs to the loop's thread."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._queued: dict[Peer, list[SequenceTokens]] = defaultdict(list)

    def put(self, router: Peer, tokens: SequenceTokens) -> None:
        """Queue tokens for the next `flush`. Tokens with a prompt's log-probabilities, which may
        be long, are flushed at once, so that a message holds those of one prompt only."""
        self._queued[router].append(tokens)
        if tokens.prompt_logprobs is not None:
            self.flush()

    def flush(self) -> None:
        """Send the queued tokens in the order of `put`."""
        for router, sequences in self._queued.items():
            self._host.send(router, StepTokens(sequences=sequences))
        self._queued.clear()
