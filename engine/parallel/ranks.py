"""The ranks of an engine, seen from one of them, and the steps that rank 0 announces."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import msgspec
import torch

from engine.attention.base import Segment
from engine.checkpoint.shard import Shard
from engine.device import fence_of
from engine.layers.summed import Sums
from engine.parallel.hidden_states import StatesLink
from engine.parallel.process_groups import RankGroups
from engine.parallel.step_watch import StepWatch
from engine.parallel.sums import RankLost
from engine.rank_times import LINE_NUMBERS, RankTimes
from scheduling.states.step import StateStep

_SIZE = struct.Struct("<I")
_NUMBER = struct.Struct("<q")
_LOOK_S = 0.001
"""How long a rank looks for the next message before it sleeps. To wake it up costs the leader tens
of microseconds where idle cores halt, as those of virtual machines do."""


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The next step of all ranks: N tokens, and for each segment how many of them it has, the
    length of its context, how many rows it wants, its block tables by group, each after its first
    block, and the slots of its states, if layers keep any. `chooses`: each rank gives the likeliest
    of its tokens, not hidden states."""

    tokens: list[int]
    segments: list[tuple[int, int, int, list[tuple[int, list[int]]], StateStep | None]]
    chooses: bool = False

    @staticmethod
    def of(segments: Sequence[Segment], tokens: list[int], chooses: bool = False) -> Step:
        """The step that computes these segments."""
        return Step(
            tokens,
            [(s.query_len, s.context_len, s.wanted_len, _tables(s), s.states) for s in segments],
            chooses,
        )

    def planned(self) -> list[Segment]:
        """The segments."""
        return [
            Segment(query, context, tables[0][1], num, tables[0][0], tuple(tables[1:]), states)
            for query, context, num, tables, states in self.segments
        ]

    @property
    def positions(self) -> list[int]:
        """Positions of the tokens, [N]."""
        spans = [(context - query, context) for query, context, *_ in self.segments]
        return [position for start, end in spans for position in range(start, end)]


class Logits(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Announces that all ranks of the last stage compute logits, of `num_rows` hidden states."""

    num_rows: int


class Replay(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Announces that all ranks replay the pass that they captured for `size` decodes, of which the
    step has some; its tokens come with the pass."""

    size: int
    step: Step


Message = Step | Logits | Replay


def _tables(segment: Segment) -> list[tuple[int, list[int]]]:
    tables = ((segment.first_block, segment.block_table), *segment.others)
    return [(first, list(table)) for first, table in tables]


_END = b""
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


def _nothing() -> None: ...


def _own_times() -> RankTimes:
    return RankTimes(memoryview(bytearray(LINE_NUMBERS * 8)).cast("q"), 0)


@dataclass(frozen=True)
class Ranks:
    """The ranks of one engine, seen from one of them.

    `links` are stream sockets: of the leader one to each follower, in the order of ranks, of a
    follower the one to the leader. They carry steps; `sums` carry what the ranks of a stage add up,
    `before` and `after` the hidden states between stages. `times` are those of all ranks. `groups`
    are the process groups by which `sums` and links reach the others, if they do; then `on_loaded`
    is called once all ranks have loaded their weights, and the leader's `watch` looks after steps
    on a card. `on_host` are the numbers of the ranks on this one's host; None: all. The methods
    raise RankLost when the other end of a link is gone.
    """

    shard: Shard
    links: Sequence[socket.socket]
    sums: Sums
    before: StatesLink | None = None
    after: StatesLink | None = None
    times: RankTimes = field(default_factory=_own_times)
    groups: RankGroups | None = None
    watch: StepWatch | None = None
    on_loaded: Callable[[], None] = _nothing
    on_host: range | None = None

    @property
    def local(self) -> range:
        """The numbers of the ranks on this one's host."""
        return range(self.shard.num_ranks) if self.on_host is None else self.on_host

    def timed(self) -> AbstractContextManager[None]:
        """Count the time of this rank's part of a step."""
        return self.times.timed(self.sums, self.before, self.after)

    @contextmanager
    def passing(self, device: torch.device) -> Iterator[None]:
        """Time a pass on `device` that the leader has announced. After an error of the leader the
        others are still in the middle of the pass and would mix it with the next one, so any error
        becomes RankLost."""
        try:
            with self.timed():
                yield
        except RankLost:
            raise
        except Exception as error:
            raise RankLost(f"rank 0 cannot compute a step: {error!r}") from error
        if self.watch is not None:
            self.watch.note(fence_of(device))

    @property
    def leads(self) -> bool:
        """Whether this rank announces the steps that the others wait for."""
        return self.shard.number == 0

    @property
    def shares_tokens(self) -> bool:
        """Whether the others get a step's tokens from the leader's device: on cards, where the host
        may not know them yet. Stages before the last one begin before the leader does."""
        return self.groups is not None and self.shard.num_stages == 1

    def join(self) -> None:
        """Wait until all ranks have loaded their weights, and connect the process groups; all ranks
        have to call this before the first pass."""
        if self.groups is not None:
            self.least(0)
            self.on_loaded()
            self.groups.open()

    def announce(self, message: Message | None) -> None:
        """Tell the followers what is next; None ends their loop."""
        self._tell(message, 0, len(self.links))

    def announce_ahead(self, message: Message) -> None:
        """Tell the stages before the last one, which come to it earlier."""
        self._tell(message, self.shard.size - 1, len(self.links))

    def announce_here(self, message: Message) -> None:
        """Tell the last stage's other ranks."""
        self._tell(message, 0, self.shard.size - 1)

    def next_message(self) -> Message | None:
        """Wait for what the leader announces; None if there is no more."""
        _look(self.links[0])
        (size,) = _SIZE.unpack(_read(self.links[0], _SIZE.size))
        if not size:
            return None
        return _DECODER.decode(_read(self.links[0], size))

    def least(self, number: int) -> int:
        """The minimum of the ranks' numbers; all ranks have to call this. The leader waits for a
        rank as long as its link's time-out says."""
        if not self.leads:
            _send(self.links[0], _NUMBER.pack(number))
            (least,) = _NUMBER.unpack(_read(self.links[0], _NUMBER.size))
            return int(least)
        numbers = [number]
        for rank, link in enumerate(self.links, start=1):
            numbers += _NUMBER.unpack(_read(link, _NUMBER.size, f"rank {rank}"))
        least = min(numbers)
        for link in self.links:
            _send(link, _NUMBER.pack(least))
        return int(least)

    def _tell(self, message: Message | None, first: int, end: int) -> None:
        data = _END if message is None else _ENCODER.encode(message)
        framed = _SIZE.pack(len(data)) + data
        for rank, link in enumerate(self.links[first:end], start=1 + first):
            try:
                link.sendall(framed)
            except OSError as error:
                raise RankLost(f"rank {rank} takes no more steps: {error}") from error


def exchange(links: Sequence[socket.socket], leads: bool, own: bytes) -> list[bytes]:
    """What each rank has given, by number; all ranks have to call this. Raises RankLost."""
    if not leads:
        _send(links[0], _SIZE.pack(len(own)) + own)
        (size,) = _SIZE.unpack(_read(links[0], _SIZE.size))
        return msgspec.msgpack.decode(_read(links[0], size), type=list[bytes])
    given = [own]
    for rank, link in enumerate(links, start=1):
        (size,) = _SIZE.unpack(_read(link, _SIZE.size, f"rank {rank}"))
        given.append(_read(link, size, f"rank {rank}"))
    data = msgspec.msgpack.encode(given)
    for link in links:
        _send(link, _SIZE.pack(len(data)) + data)
    return given


def _send(link: socket.socket, data: bytes) -> None:
    try:
        link.sendall(data)
    except OSError as error:
        raise RankLost(f"a rank is gone: {error}") from error


def _look(link: socket.socket) -> None:
    """Wait awake for data, a short while; others may have the core meanwhile."""
    ends = time.perf_counter() + _LOOK_S
    while time.perf_counter() < ends:
        try:
            link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            os.sched_yield()
        except OSError:
            return  # the read that follows says what it is
        else:
            return


def _read(link: socket.socket, size: int, other: str = "a rank") -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            part = link.recv(size - len(data))
        except TimeoutError as error:
            raise RankLost(f"{other} has not loaded within {link.gettimeout():g} s") from error
        except OSError as error:
            raise RankLost(f"{other} is gone: {error}") from error
        if not part:
            raise RankLost(f"{other} is gone")
        data += part
    return bytes(data)
