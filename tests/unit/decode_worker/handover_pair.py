"""Decode worker D, which a request leaves in mid-stream, and E, which goes on with D's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from process.sockets.control import Peer
from protocol.messages import (
    Generate,
    HandedOver,
    HandOver,
    KvPeer,
    Resume,
    Resumed,
    Role,
    StepTokens,
)
from tests.sequences import greedy
from tests.unit.fake_model import continuation
from tests.unit.fake_peers import Write
from tests.unit.worker_harness import ROUTER, Clock, DecodeBench, finish, land

PROMPT = list(range(10))
LEAVE = HandOver(request_id="r", attempt=1, next_attempt=2)
OTHER = Peer(b"other", "other", Role.ROUTER)
RESUME = Resume(request_id="r", attempt=65537)
D_PEER = KvPeer(worker_id="d", incarnation="d-i", control="inproc://d")


class Handover:
    """Both workers, the connection between them, and the router's notes."""

    def __init__(
        self, max_tokens: int = 12, prompt: Sequence[int] = PROMPT, ahead: bool = False
    ) -> None:
        self.clock = Clock()
        self.router = ROUTER
        self.is_resumable = False
        self.d, self.e = (DecodeBench(n, self.clock, one_step_ahead=ahead) for n in "de")
        self.e.peers.answers_asks = False  # D answers
        self.prompt = list(prompt)
        self.max_tokens = max_tokens
        self.tokens: dict[int, int] = {}
        self.cached: int | None = None  # as the attempt with the first token said
        self.to_d: list[Any] = []
        self.to_e: list[Any] = []
        self.landed: list[Write] = []
        self.ends: list[tuple[str, Any]] = []
        self.is_connected = False

    # -- the router -------------------------------------------------------------------------

    def generate(self, attempt: int, num_output: int, peer: KvPeer | None = None) -> Generate:
        return Generate(
            request_id="r",
            attempt=attempt,
            token_ids=self.prompt + continuation(self.prompt, num_output),
            num_output=num_output,
            sampling=greedy(self.max_tokens),
            deadline_ms=60_000,
            is_resumable=self.is_resumable,
            cached_tokens=(self.cached or 0) if num_output else 0,
            prefill=peer,
        )

    def run_to(self, num_tokens: int) -> None:
        """Let the request run on D until it has so many tokens."""
        self.d.server.inbox.append((ROUTER, self.generate(1, 0)))
        while len(self.tokens) < num_tokens:
            self.turn("d")

    def leave(self, asked: HandOver = LEAVE) -> HandedOver:
        self.d.server.inbox.append((self.router, asked))
        self.turn("d")
        return next(m for _, m in self.ends if isinstance(m, HandedOver))

    def go_on(self, attempt: int = 2) -> None:
        """Begin the next attempt, as the router does after HandedOver."""
        generate = self.generate(attempt, len(self.tokens) - 1, D_PEER)
        self.e.server.inbox.append((self.router, generate))

    def resume(self, *names: str) -> None:
        """The router dies, and another one asks these workers for the stream."""
        self.router = OTHER
        self.tokens.clear()
        for bench in (self.d, self.e):
            bench.server.gone.append(ROUTER)
        for name in "de":
            self.turn(name)
        for name in names:
            (self.d if name == "d" else self.e).server.inbox.append((OTHER, RESUME))
            self.turn(name)

    def note(self, worker: str, message: Any) -> None:
        if isinstance(message, Resumed):
            assert message.token_ids == continuation(self.prompt, len(message.token_ids))
            self.tokens = dict(enumerate(message.token_ids))
            assert not self.tokens or message.cached_tokens == self.cached
            return
        if not isinstance(message, StepTokens):
            self.ends.append((worker, message))
            return
        for each in message.sequences:
            (token,) = each.token_ids
            assert token == continuation(self.prompt, each.index + 1)[each.index]
            assert each.index <= len(self.tokens), "a token is skipped"
            if self.cached is None or not self.tokens:
                self.cached = each.cached_tokens
            elif each.cached_tokens is not None:
                assert each.cached_tokens == self.cached
            self.tokens[each.index] = token

    def ends_of_d(self) -> list[Any]:
        return [m for name, m in self.ends if name == "d" and not isinstance(m, HandedOver)]

    # -- the network ------------------------------------------------------------------------

    def turn(self, name: str) -> None:
        bench = self.d if name == "d" else self.e
        bench.worker.turn()
        for peer, message in bench.server.sent:
            if peer == self.router:
                self.note(name, message)
            elif peer == self.e.as_peer:
                self.to_e.append(message)
        bench.server.sent.clear()
        if self.e.peers.connected and not self.is_connected:
            self.is_connected = True
            self.to_d.append(self.e.descriptor)
        self.to_d += [message for _, message in self.e.peers.sent]
        self.e.peers.sent.clear()

    def deliver(self, name: str) -> None:
        if name == "d":
            self.d.server.inbox += [(self.e.as_peer, message) for message in self.to_d]
            self.to_d.clear()
        else:
            self.e.peers.inbox += [("d-i", message) for message in self.to_e]
            self.to_e.clear()

    def write_lands(self) -> None:
        for write in [each for each in self.d.transfers.writes if each not in self.landed][:1]:
            pins = self.e.scheduler.blocks._pins
            assert all(pins[block] for block in write.target_blocks), "into a free block"
            land(write, self.d, self.e)
            self.landed.append(write)

    def write_finishes(self) -> None:
        for write in [each for each in self.d.transfers.writes if each in self.landed][:1]:
            finish(write, self.d)

    def write_fails(self) -> None:
        for write in [each for each in self.d.transfers.writes if each not in self.landed][:1]:
            self.d.transfers.fail(write, "the connection was reset")

    def lose_e(self) -> None:
        """D notices that E is gone; E, if it lives, introduces itself again."""
        self.d.server.inbox = [each for each in self.d.server.inbox if each[0] == self.router]
        self.d.server.gone.append(self.e.as_peer)
        self.to_d.clear()
        self.to_e.clear()
        self.e.peers.inbox.clear()
        self.e.as_peer = Peer(self.e.as_peer.identity + b"'", "e", self.e.as_peer.role)
        if self.is_connected:
            self.turn("d")
            self.e.peers.forgotten.append("d-i")
            self.to_d.append(self.e.descriptor)

    def round(self) -> None:
        for name in "de":
            self.deliver(name)
            self.turn(name)
        for _ in range(len(self.d.transfers.writes)):
            self.write_lands()
            self.write_finishes()

    def settle(self) -> None:
        for _ in range(60):
            self.round()
            if self.is_idle():
                return
            self.clock.now += 0.3
        raise AssertionError(f"something is left over: {self.ends}")

    def is_idle(self) -> bool:
        benches = (self.d, self.e)
        return not (
            any(bench.role.num_jobs or bench.server.inbox for bench in benches)
            or any(bench.source.num_open + bench.sink.num_open for bench in benches)
            or any((self.to_d, self.to_e, self.d.transfers.writes))
        )

    def close(self) -> None:
        for bench in (self.d, self.e):
            assert bench.scheduler.sequences == []
            assert bench.scheduler.blocks.num_pinned == 0, "blocks were left behind"
            assert bench.model.strays == []
            bench.scheduler.blocks.check()
            bench.close()
        assert self.d.role.outbound._speakers == {}
