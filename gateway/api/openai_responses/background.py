"""Responses in the background: they run without a client, as long as their router lives.

The store knows them from the start, as `queued`, then `in_progress`. The router that runs them
renews their leases; the renewal tells it if one was cancelled or deleted through any router. If the
router dies, the leases end and the responses count as failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from gateway.api.openai_responses import answer as api
from gateway.api.openai_responses.event_log import EventLog
from gateway.api.openai_responses.memory import LEASE_S, ResponseMemory
from process.store.client_faults import check_cancelled
from process.store.response_records import ResponseName
from protocol.errors import GenerationFailed, StoreTrouble

log = logging.getLogger(__name__)

RENEW_S = 1.0
Work = Callable[[], Coroutine[Any, Any, api.Response]]
Failed = Callable[[Exception], api.Response]


class BackgroundRuns:
    """The responses that this router runs in the background."""

    def __init__(self, memory: ResponseMemory, registry: CollectorRegistry) -> None:
        self.memory = memory
        self._runs: dict[ResponseName, asyncio.Task[None]] = {}
        self._logs: dict[ResponseName, EventLog] = {}
        self._unwanted: set[ResponseName] = set()
        running = Gauge(
            "baton_responses_in_background",
            "Responses that this router runs in the background",
            registry=registry,
        )
        running.set_function(lambda: len(self._runs))

    def start(
        self,
        name: ResponseName,
        work: Work,
        failed: Failed,
        ended: Callable[[], object],
        log: EventLog | None = None,
    ) -> None:
        """Run a response that the store knows. `work` returns its final form, `failed` the final
        form after an error. `ended` is called last. `log` collects the events of a stream."""
        task = self.memory.start(self._run(name, work, failed, log))
        self._runs[name] = task
        if log is not None:
            self._logs[name] = log

        def on_done(_: object) -> None:
            del self._runs[name]
            self._logs.pop(name, None)
            self._unwanted.discard(name)
            ended()

        task.add_done_callback(on_done)

    def log_of(self, name: ResponseName) -> EventLog | None:
        """The events of a streamed response that runs here."""
        return self._logs.get(name)

    def stop(self, name: ResponseName) -> None:
        """End a response that was cancelled or deleted, if it runs here."""
        task = self._runs.get(name)
        if task is not None:
            self._unwanted.add(name)
            task.cancel()

    async def run(self) -> None:
        """Renew the leases until cancelled, then close the connections."""
        try:
            while True:
                await asyncio.sleep(RENEW_S)
                await asyncio.gather(*(self._renew(name) for name in list(self._runs)))
        finally:
            await self.memory.records.close()

    async def _renew(self, name: ResponseName) -> None:
        try:
            is_wanted = await self.memory.records.renew(name, LEASE_S)
        except StoreTrouble:
            return
        if not is_wanted:
            self.stop(name)

    async def _run(
        self, name: ResponseName, work: Work, failed: Failed, log: EventLog | None
    ) -> None:
        try:
            response = await self._result(name, work, failed)
        finally:
            if log is not None:
                log.end()
        if response is not None:
            await self._keep(name, response, b"" if log is None else log.whole())

    async def _result(self, name: ResponseName, work: Work, failed: Failed) -> api.Response | None:
        """The final form of a response; None if nobody wants it any more."""
        try:
            await self._renew(name)
            check_cancelled()
            return await work()
        except asyncio.CancelledError:
            if name in self._unwanted:
                return None
            return failed(GenerationFailed("the router stopped before it was finished"))
        except Exception as error:  # noqa: BLE001 - the top: fails this one response
            return failed(error)

    async def _keep(self, name: ResponseName, response: api.Response, events: bytes) -> None:
        """Write the final form and the events; while the store is away, retry for as long as the
        lease may hold."""
        answer = msgspec.json.encode(response)
        reason = StoreTrouble.reason
        for _ in range(round(LEASE_S / RENEW_S)):
            try:
                await self.memory.finish(name, response.status, answer, events)
                return
            except StoreTrouble as error:
                reason = error.reason
                await asyncio.sleep(RENEW_S)
        self.memory.give_up(name, reason)
