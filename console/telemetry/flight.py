"""The flight recorders of the router and its workers, as JSON.

The router's events come from its traces and from the history of the fleet. Its recorder adds what
neither contains: refusals, and delays of the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from process.flight_recorder import FlightRecorder
from protocol.flight import FlightEvent, FlightKind
from protocol.messages import FlightRequest
from router.fleet.fleet import Fleet
from router.requests.trace import RequestTrace
from router.requests.trace_store import TraceStore

ROUTER = "router"
_ENDS = {
    "finished": (FlightKind.FINISHED, ""),
    "failed": (FlightKind.FAILED, "the request failed"),
    "closed": (FlightKind.ABORTED, "its client left"),
}


class FlightReport:
    """The recorders of this router and of the fleet's workers."""

    def __init__(self, fleet: Fleet, traces: TraceStore, recorder: FlightRecorder) -> None:
        self._fleet = fleet
        self._traces = traces
        self._recorder = recorder

    def names(self) -> list[str]:
        """The processes whose recorders can be read: the router and its workers."""
        return [ROUTER, *(worker.worker_id for worker in self._fleet.workers())]

    async def as_json(self, name: str, wanted: FlightRequest) -> dict[str, Any] | None:
        """The body of `/flight`: the events of one process, oldest first; None if there is no
        such process. Raises ServiceError if it does not answer."""
        if name == ROUTER:
            events = self._of_router(wanted)
        else:
            worker = self._fleet.worker(name)
            if worker is None:
                return None
            events = await self._fleet.flights.ask(worker, wanted)
        return {
            "process": name,
            "events": [
                {
                    "at_us": each.at_us,
                    "duration_us": each.duration_us,
                    "kind": each.kind.value,
                    "request_id": each.request_id,
                    "attempt": each.attempt,
                    "number": each.number,
                    "tokens": each.tokens,
                    "text": each.text,
                }
                for each in events
            ],
        }

    def _of_router(self, wanted: FlightRequest) -> list[FlightEvent]:
        found = [event for trace in self._traces.all() for event in _events_of(trace)]
        found += [
            FlightEvent(each.at_us, 0, FlightKind.FLEET, text=each.text)
            for each in self._fleet.history.events()
        ]
        after = 0
        while True:
            events, after = self._recorder.page(after)
            found += events
            if not after:
                break
        return sorted(
            (each for each in found if _is_wanted(each, wanted)), key=lambda each: each.at_us
        )


def _events_of(trace: RequestTrace) -> Iterator[FlightEvent]:
    name = trace.request_id
    yield FlightEvent(
        trace.received_us, 0, FlightKind.RECEIVED, name, 0, 0, trace.num_prompt_tokens
    )
    for each in trace.attempts:
        rule = each.placement.rule.value
        text = f"{each.placement.mode.value}: {each.workers} ({rule})"
        yield FlightEvent(each.started_us, 0, FlightKind.PLACED, name, each.number, text=text)
        if each.failed is not None:
            failed = each.failed
            yield FlightEvent(each.failed_us, 0, FlightKind.FAILED, name, each.number, text=failed)
    last = trace.attempts[-1].number if trace.attempts else 0
    if trace.first_token_us:
        yield FlightEvent(trace.first_token_us, 0, FlightKind.FIRST_TOKEN, name, last)
    if trace.outcome is not None:
        kind, text = _ENDS[trace.outcome]
        tokens = trace.num_output_tokens
        yield FlightEvent(trace.finished_us, 0, kind, name, last, 0, tokens, text)


def _is_wanted(event: FlightEvent, wanted: FlightRequest) -> bool:
    """Whether the event lies in the wanted time span and belongs to the wanted request or to
    none."""
    is_other = wanted.request_id and event.request_id and event.request_id != wanted.request_id
    is_later = wanted.until_us and event.at_us > wanted.until_us
    return not is_other and not is_later and event.at_us + event.duration_us >= wanted.since_us
