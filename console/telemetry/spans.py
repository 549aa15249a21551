"""The spans of one generation, as a tree: what each process did, by the router's clock.

The router has the workers' times from their traces, so the router makes all spans of a request.
Each span names the process that spent the time. Pure: ids are assigned by the exporter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.traces import ChunkSpan, DecodeTrace, PrefillTrace
from router.requests.stages import AttemptTimes
from router.requests.trace import RequestTrace
from router.requests.trace_json import times_of

ROUTER = "router"
PREFILL, DECODE = "prefill", "decode"
Attributes = dict[str, str | int | float | bool]


@dataclass
class SpanNode:
    """One span; `role` and `process` name the process that spent the time (`process` "": this
    router)."""

    name: str
    start_us: int
    end_us: int
    role: str = ROUTER
    process: str = ""
    attributes: Attributes = field(default_factory=dict)
    error: str = ""
    children: list[SpanNode] = field(default_factory=list)

    def add(self, node: SpanNode) -> SpanNode:
        """Add a child; returns it."""
        self.children.append(node)
        return node


def generation_spans(trace: RequestTrace) -> SpanNode:
    """The tree of a generation that has ended."""
    times = times_of(trace, trace.finished_us)
    root = SpanNode(
        "generation",
        trace.received_us,
        trace.finished_us,
        attributes={
            "baton.request_id": trace.request_id,
            "baton.outcome": trace.outcome or "running",
            "gen_ai.usage.input_tokens": trace.num_prompt_tokens,
            "gen_ai.usage.output_tokens": trace.num_output_tokens,
        },
        error="" if trace.outcome != "failed" else "the generation failed",
    )
    root.add(SpanNode("tokenize", trace.received_us, trace.tokenized_us))
    if times.attempts:
        root.add(SpanNode("placement", trace.tokenized_us, times.attempts[0].started_us))
    for attempt, shown in zip(trace.attempts, times.attempts, strict=True):
        node = root.add(_attempt(attempt.number, attempt.placement.reason, shown))
        if shown.prefill is not None:
            _prefill(node, shown.prefill)
        if shown.decode is not None:
            _decode(node, shown.decode, shown.prefill)
    if trace.first_token_received_us:
        received, sent = trace.first_token_received_us, trace.first_token_us
        root.add(SpanNode("first token delivery", received, sent))
    return root


def _attempt(number: int, reason: str, times: AttemptTimes) -> SpanNode:
    return SpanNode(
        "attempt",
        times.started_us,
        times.failed_us or times.next_us,
        attributes={
            "baton.attempt": number,
            "baton.mode": times.mode.value,
            "baton.placement": reason,
            "baton.workers": times.workers,
        },
        error=times.failed or "",
    )


def _prefill(parent: SpanNode, trace: PrefillTrace) -> None:
    who = (PREFILL, trace.worker_id)
    ends = [each.end_us for each in trace.chunks] + [each.done_us for each in trace.writes]
    end_us = max([trace.scheduled_us, trace.received_us, *ends])
    node = parent.add(SpanNode("prefill", trace.received_us, end_us, *who))
    node.attributes["baton.cached_tokens"] = trace.cached_tokens
    node.attributes["baton.fetched_tokens"] = trace.fetched_tokens
    node.add(SpanNode("queue", trace.received_us, trace.scheduled_us, *who))
    _chunks(node, trace.chunks, who)
    for write in trace.writes:
        transfer = node.add(SpanNode("transfer", write.post_us, write.done_us, *who))
        transfer.attributes |= {"baton.blocks": write.num_blocks, "baton.chunk": write.chunk}
        transfer.attributes["baton.transport"] = trace.transport


def _decode(parent: SpanNode, trace: DecodeTrace, prefill: PrefillTrace | None) -> None:
    who = (DECODE, trace.worker_id)
    steps = trace.step_spans
    end_us = max([trace.received_us, trace.finished_us, *(each.end_us for each in steps[-1:])])
    node = parent.add(SpanNode("decode", trace.received_us, end_us, *who))
    node.attributes |= {
        "baton.decode_steps": trace.num_decode_steps,
        "baton.preemptions": trace.num_preemptions,
    }
    first_us = trace.chunks[0].start_us if trace.chunks else trace.admitted_us
    node.add(SpanNode("queue", trace.received_us, first_us or trace.received_us, *who))
    _chunks(node, trace.chunks, who)
    if prefill is not None and prefill.chunks and trace.first_step_us:
        begin_us = prefill.chunks[-1].end_us
        node.add(SpanNode("handoff", begin_us, max(begin_us, trace.first_step_us), *who))
    if steps:
        begin_us = steps[0].start_us
        running = node.add(SpanNode("decode steps", begin_us, steps[-1].end_us, *who))
        for stall in trace.stalls:
            gap = running.add(SpanNode("stall", stall.start_us, stall.end_us, *who))
            gap.attributes["baton.reason"] = stall.reason


def _chunks(parent: SpanNode, chunks: tuple[ChunkSpan, ...], who: tuple[str, str]) -> None:
    for number, chunk in enumerate(chunks, start=1):
        node = parent.add(SpanNode("chunk", chunk.start_us, chunk.end_us, *who))
        node.attributes |= {"baton.chunk": number, "baton.tokens": chunk.num_tokens}
