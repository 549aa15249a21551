"""A request's trace, and flight recorders, as a file that Perfetto and Chrome open: the JSON trace
event format.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Each process of the
fleet is a process there. A prefill worker's transfers, and the events of a process's recorder, have
lanes of their own. Pure: takes the bodies of `/requests/{id}/trace` and of `/flight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Event = dict[str, Any]
_ROUTER = "router"
_WORK, _TRANSFERS, _STEPS, _CHUNKS, _WRITES, _EVENTS = range(1, 7)
_LANES = {
    _WORK: "work",
    _TRANSFERS: "KV transfer",
    _STEPS: "recorded steps",
    _CHUNKS: "recorded chunks",
    _WRITES: "recorded KV writes",
    _EVENTS: "recorded events",
}
_RECORDED = {"step": _STEPS, "chunk": _CHUNKS, "write": _WRITES}


def perfetto_trace(trace: dict[str, Any], records: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The file of a request, for `json.dump`. `records` are the recorders' events of its time."""
    spans = [*_spans(trace), *(event for each in records for event in _recorded(each))]
    return _file(spans, {"request_id": trace["request_id"], "outcome": trace["outcome"]})


def perfetto_flight(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The file of whole recorders, for `json.dump`."""
    names = ", ".join(each["process"] for each in records)
    return _file([event for each in records for event in _recorded(each)], {"processes": names})


def _file(spans: list[Event], about: dict[str, Any]) -> dict[str, Any]:
    processes = {name: number for number, name in enumerate(_names(spans), start=1)}
    events = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
        for name, number in processes.items()
    ]
    lanes = sorted({(processes[each["pid"]], each["tid"]) for each in spans})
    events += [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": _LANES[tid]}}
        for pid, tid in lanes
    ]
    events += [{**each, "pid": processes[each["pid"]]} for each in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names(spans: list[Event]) -> list[str]:
    """The processes, the router first, the others in order of appearance."""
    return sorted(dict.fromkeys(each["pid"] for each in spans), key=lambda name: name != _ROUTER)


def _spans(trace: dict[str, Any]) -> Iterator[Event]:
    attempts = trace["attempts"]
    started = attempts[0]["started_us"] if attempts else trace["finished_us"]
    yield from _span(_ROUTER, "tokenize", trace["received_us"], trace["tokenized_us"])
    decided = _decided(attempts[0]["placement"]) if attempts else {}
    yield from _span(_ROUTER, "placement", trace["tokenized_us"], started, **decided)
    for attempt in attempts:
        yield from _attempt(trace, attempt)
    received, sent = trace["first_token_received_us"], trace["first_token_us"]
    yield from _span(_ROUTER, "first token delivery", received, sent)
    yield from _span(_ROUTER, "stream", sent, trace["last_token_us"])


def _decided(placement: dict[str, Any]) -> dict[str, Any]:
    """Why the request was placed there: predictions, and the parts of each candidate's cost."""
    shown = {name: placement[name] for name in ("mode", "reason", "ttft_ms", "tpot_ms", "cost_ms")}
    for role in ("prefill", "decode"):
        for each in placement[f"{role}_candidates"]:
            parts = {name: part for name, part in each.items() if name.endswith("_ms") and part}
            shown[f"{role} {each['worker_id']}"] = parts
    return shown


def _attempt(trace: dict[str, Any], attempt: dict[str, Any]) -> Iterator[Event]:
    prefill, decode = attempt["prefill"], attempt["decode"]
    if attempt["failed"]:
        name = f"attempt {attempt['attempt']} failed"
        end_us = attempt["failed_us"] or trace["finished_us"]
        yield from _span(_ROUTER, name, attempt["started_us"], end_us, reason=attempt["failed"])
    if prefill:
        where = prefill["worker_id"]
        yield from _span(where, "queue", prefill["received_us"], prefill["scheduled_us"])
        yield from _chunks(where, prefill["chunks"])
        for start, end, reason in prefill["waits"]:
            yield from _span(where, "wait", start, end, reason=reason)
        for post, done, blocks, chunk in prefill["writes"]:
            yield from _span(where, "transfer", post, done, _TRANSFERS, blocks=blocks, chunk=chunk)
    if decode:
        where = decode["worker_id"]
        admitted = decode["admitted_us"]
        yield from _span(where, "queue", decode["received_us"], admitted)
        yield from _chunks(where, decode["chunks"])
        if decode["blocks_arrived_us"]:
            yield from _span(where, "receive KV", admitted, decode["blocks_arrived_us"])
        for start, end, batch, number, tokens in decode["steps"]:
            yield from _span(
                where, "decode", start, end, batch=batch, steps=number, prompt_tokens=tokens
            )
        for start, end, reason in decode["stalls"]:
            yield from _span(where, "stall", start, end, reason=reason)


def _recorded(record: dict[str, Any]) -> Iterator[Event]:
    """Steps, chunks and writes as spans, all other events as instants."""
    where = record["process"]
    for each in record["events"]:
        kind = each["kind"]
        lane = _RECORDED.get(kind, _EVENTS)
        args = {
            name: each[name]
            for name in ("request_id", "attempt", "number", "tokens", "text")
            if each[name] or (name == "attempt" and each["request_id"])
        }
        event: Event = {"name": kind, "pid": where, "tid": lane, "ts": each["at_us"], "args": args}
        if each["duration_us"] or lane != _EVENTS:
            yield {"ph": "X", "dur": each["duration_us"], **event}
        else:
            yield {"ph": "i", "s": "t", **event}


def _chunks(where: str, chunks: list[list[int]]) -> Iterator[Event]:
    for number, (start, end, tokens) in enumerate(chunks, start=1):
        yield from _span(where, f"chunk {number}", start, end, tokens=tokens)


def _span(
    where: str, name: str, start_us: int, end_us: int, lane: int = _WORK, **args: Any
) -> Iterator[Event]:
    """A complete event; nothing if one of its ends is unknown."""
    if start_us and end_us:
        yield {
            "ph": "X", "name": name, "pid": where, "tid": lane, "ts": start_us,
            "dur": max(0, end_us - start_us), "args": args,
        }  # fmt: skip
