"""Keeps responses that have ended, and runs responses that no client waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from gateway.api.context import ApiContext
from gateway.api.openai_responses import answer as api
from gateway.api.openai_responses.answer_format import ResponseFormat
from gateway.api.openai_responses.background import BackgroundRuns
from gateway.api.openai_responses.event_log import EventLog, followed
from gateway.api.openai_responses.memory import Made
from gateway.api.replies.plan import Plan
from gateway.api.replies.reply import run_into, run_unattended
from gateway.http.request_scope import record_of
from http_kit.errors import describe
from process.store.response_records import QUEUED, ResponseName

_TOKEN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Keeping:
    """How a response is kept: its name, the bytes of its input, and the function that makes the
    JSON of its input's items."""

    runs: BackgroundRuns
    name: ResponseName
    num_bytes: int
    make_input: Callable[[], bytes]

    def keep(self, response: api.Response) -> None:
        """Keep a response that has ended."""

        def make() -> Made:
            return response.status, msgspec.json.encode(response), self.make_input()

        self.runs.memory.keep(self.name, self.num_bytes + _answer_bytes(response), make)


def _answer_bytes(response: api.Response) -> int:
    """The estimated bytes of an answer: its text, and its log-probabilities if it has any."""
    num_tokens = response.usage.output_tokens if response.usage is not None else 0
    return _TOKEN_BYTES * num_tokens * (1 + response.top_logprobs)


class ResponseEnd:
    """Receives a response when it has ended, from any thread. A foreground response is kept."""

    def __init__(self, keeping: Keeping | None) -> None:
        self.response: api.Response | None = None
        self._keeping = keeping
        self._loop = asyncio.get_running_loop()

    def take(self, response: api.Response) -> None:
        """Take a response that has ended."""
        self.response = response
        if self._keeping is not None and not response.background:
            self._loop.call_soon_threadsafe(self._keeping.keep, response)


@dataclass(frozen=True, slots=True)
class UnattendedRun:
    """The plan of one response in the background."""

    context: ApiContext
    plan: Plan
    answer_format: ResponseFormat
    end: ResponseEnd

    async def start(self, scope: Scope, keeping: Keeping, blank: api.Response) -> Response:
        """Start the run. Returns the answer to the request: the response's JSON as it is now, or
        the stream of its events. Raises StoreTrouble, and InvalidRequest if the response is too
        large to be kept."""
        is_streamed = bool(self.plan.fields.stream)
        answer = msgspec.json.encode(msgspec.structs.replace(blank, status=QUEUED))
        given = await self.context.convert(scope, keeping.make_input)
        await keeping.runs.memory.begin(keeping.name, answer, given, is_streamed)
        record = record_of(scope).detach()
        log = EventLog(record) if is_streamed else None

        async def work() -> api.Response:
            if log is None:
                await run_unattended(self.context, record, self.plan, self.answer_format)
            else:
                log.write(self.answer_format.queued())
                await run_into(self.context, record, self.plan, self.answer_format, log)
            assert self.end.response is not None, "a finished run has ended the response"
            return self.end.response

        def failed(error: Exception) -> api.Response:
            described = describe(error, record.request_id)
            if log is None:
                return self.answer_format.failed(described)
            log.end(self.answer_format.failure(described))
            assert self.end.response is not None, "`failure` ends the response"
            return self.end.response

        leave = record.release if log is None else log.leave_run
        keeping.runs.start(keeping.name, work, failed, leave, log)
        if log is None:
            return Response(answer, media_type="application/json")
        return followed(self.context, scope, log.follow(0))
