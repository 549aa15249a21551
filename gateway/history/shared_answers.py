"""Remembered answers in the cluster's store, where every router finds them.

What the store holds is sealed, and untrusted when it comes back. A prompt waits only a moment for
the store; without an answer in time, it is encoded as if nothing were known. Answers are written in
the background, a bounded number at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.history.answers import AnswerScope
from gateway.history.seal import Seal
from process.store.ignored_entries import ANSWER, IgnoredEntries
from process.store.response_records import ResponseName, ResponseRecord, ResponseRecords
from protocol.errors import StoreTrouble

WAIT_S, RESUMED_WAIT_S = 0.05, 2.0
MOST_NAMES = 1024
"""Answers that are looked for at once: those nearest to the prompt's end."""
MOST_PENDING = 64
_KEPT = "completed"


@dataclass
class SharedAnswers:
    """Implements `AnswerStore`. A prompt waits `wait_s` for the store. The prompt of a resumed
    stream waits longer, because it must have the same tokens as before.

    The store is asked while there are other routers, and for `ttl_s` after that, until their
    answers have expired.
    """

    records: ResponseRecords
    seal: Seal
    ignored: IgnoredEntries
    has_others: Callable[[], bool]
    ttl_s: float
    wait_s: float = WAIT_S
    clock: Callable[[], float] = time.monotonic
    _asks_until: float = 0.0
    _pending: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def asks(self) -> bool:
        """See `AnswerStore`."""
        self.note_other_routers()
        return self.clock() < self._asks_until

    def note_other_routers(self) -> None:
        """Note whether there are other routers now."""
        if self.has_others():
            self._asks_until = self.clock() + self.ttl_s

    async def begin(self) -> None:
        """Find out whether earlier routers left answers."""
        try:
            may_have = await self.records.num_records() > 0
        except StoreTrouble:
            may_have = True
        if may_have:
            self._asks_until = self.clock() + self.ttl_s

    async def find(self, scope: AnswerScope, names: Sequence[bytes]) -> list[bytes | None]:
        """See `AnswerStore`."""
        nothing: list[bytes | None] = [None] * len(names)
        asked = names[-MOST_NAMES:]
        try:
            async with asyncio.timeout(RESUMED_WAIT_S if scope.is_resumed else self.wait_s):
                found = await self.records.answers([self._name(scope, each) for each in asked])
        except (StoreTrouble, TimeoutError):
            return nothing
        opened = [self._open(scope, *each) for each in zip(asked, found, strict=True)]
        return [*nothing[: len(names) - len(asked)], *opened]

    def put(self, scope: AnswerScope, name: bytes, ids: bytes) -> None:
        """See `AnswerStore`. Drops the answer if too many are being written."""
        if len(self._pending) >= MOST_PENDING:
            return
        task = asyncio.create_task(self._put(scope, name, ids))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def settled(self) -> None:
        """Wait for the answers that are being written."""
        if self._pending:
            await asyncio.wait(self._pending)

    async def _put(self, scope: AnswerScope, name: bytes, ids: bytes) -> None:
        sealed = self.seal.close(scope.salt, name, ids)
        try:
            record = ResponseRecord(_KEPT, False, sealed, b"")
            await self.records.put(self._name(scope, name), record)
        except StoreTrouble:
            return  # it is not found, and the next turn's history is encoded as text

    def _name(self, scope: AnswerScope, name: bytes) -> ResponseName:
        return ResponseName(self.seal.owner(scope.owner), name.hex())

    def _open(self, scope: AnswerScope, name: bytes, sealed: bytes | None) -> bytes:
        if sealed is None:
            return b""
        try:
            return self.seal.open(scope.salt, name, sealed)
        except ValueError as error:
            self.ignored.note(ANSWER, name.hex(), sealed, error)
            return b""
