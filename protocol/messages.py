"""Messages that open connections, and those between routers and workers. Messages between workers
are in `protocol.handoff_messages` and `weight_messages`, published events in `protocol.events`.

Tagged, frozen, MessagePack. Every message about a request carries `request_id` and `attempt`: the
attempt number fences off late messages of earlier attempts. `Hello` comes first on every
connection; no other message is answered before it is accepted. Durations are remaining times, never
absolute clocks, except in traces (`*_us`: microseconds since the Unix epoch).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.field_bounds import (
    MAX_TOKENS,
    Count,
    Dimension,
    Duration,
    Endpoint,
    Hashes,
    Name,
    Pid,
    Reason,
    RequestId,
    Signed,
    Text,
    TokenId,
    TokenIds,
)
from protocol.flight import FlightEvent
from protocol.message_base import Message
from protocol.retention import RetentionHint
from protocol.sampling import PromptLogprobs, SamplingParams, TokenLogprobs
from protocol.traces import DecodeTrace, PrefillTrace

PROTOCOL_VERSION = 13
Logprobs = Annotated[list[TokenLogprobs], Meta(max_length=MAX_TOKENS)]


class Role(StrEnum):
    """A process's role in the fleet."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


class TierName(StrEnum):
    """A tier below a worker's KV pool."""

    HOST = "host"
    DISK = "disk"


class FinishReason(StrEnum):
    """Why a sequence ended on its worker."""

    STOP = "stop"
    LENGTH = "length"


# -- connection set-up ----------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The connecting side's first message; an empty fingerprint (a router's) is not compared.

    A router names a new `session` for each connection: load reports count its requests by it.
    `weight_version` and `revision` are a worker's, as in `WorkerInfo`. `kv_groups` describes the
    groups of layers of its KV layout; "" if all layers keep all tokens.
    """

    sender: Text
    role: Role
    protocol_version: Count
    model_fingerprint: Text
    layout_fingerprint: Text
    session: Text = ""
    weight_version: Text = ""
    revision: Text = ""
    kv_groups: Text = ""


class HelloAccepted(Message, frozen=True, kw_only=True):
    """The connection may be used; carries the receiver's own name.

    `machine` and `pid` say where its process runs, as in `WorkerInfo`; "" if that is unknown.
    """

    worker_id: Text
    incarnation: Text
    machine: Text = ""
    pid: Pid = 0


class HelloRefused(Message, frozen=True, kw_only=True):
    """The connection may not be used; names the difference, with both values."""

    what: Text
    ours: Text
    theirs: Text


class Ping(Message, frozen=True, kw_only=True):
    """Asks for a Pong, which shows that the peer's event loop runs."""

    nonce: Count


class SetLimits(Message, frozen=True, kw_only=True):
    """New limits of a worker's steps, from its next step on; None leaves a limit unchanged. The
    worker stays within its planned memory, and registers the limits that it applied."""

    chunk_max_tokens: Dimension | None = None
    itl_target_ms: Duration | None = None


class Pong(Message, frozen=True, kw_only=True):
    """Answer to Ping; `wall_us` is the answering process's wall clock, 0 if unknown."""

    nonce: Count
    wall_us: Count = 0


# -- router to workers ----------------------------------------------------------------------


class KvPeer(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that has KV of an attempt: one that computes its prompt, hands the request over, or
    holds leading blocks in its cache."""

    worker_id: Name
    incarnation: Name
    control: Endpoint


class KvHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that probably has the first `num_blocks` blocks of a prompt in its cache."""

    peer: KvPeer
    num_blocks: Dimension


class NewAttempt(Message, frozen=True, kw_only=True):
    """The fields of an attempt that both roles need.

    - `token_ids`: the prompt followed by `num_output` tokens that earlier attempts delivered; the
      first token of this attempt has index `num_output`.
    - A resumable attempt outlives its router for a while, see Resume.
    - `trace_id`: the trace that the request is part of, for log lines; "" if there is none.
    - `share`: workers give each share, one for each owner of a key, equal turns.
    - `session`: the conversation or agent whose turn it is; "" if it is not known.
    - `cache_salt`: separates its blocks in caches from those of others, except for the blocks that
      the first `shared_tokens` tokens fill.
    - `stays_in_pool`: no worker keeps its KV in host memory or on disk below its pool.
    - `holders`: workers from which the worker that computes the prompt may fetch blocks; the best
      is first.
    """

    request_id: RequestId
    attempt: Count
    token_ids: TokenIds
    num_output: Count
    sampling: SamplingParams
    priority: Signed = 0
    deadline_ms: Count
    cache_salt: Text = ""
    shared_tokens: Count = 0
    share: Text = ""
    session: Text = ""
    stays_in_pool: bool = False
    is_resumable: bool = False
    trace_id: Text = ""
    holders: Annotated[list[KvHolder], Meta(max_length=1024)] = msgspec.field(default_factory=list)


class Generate(NewAttempt, frozen=True, kw_only=True):
    """Router to decode worker: produce tokens for this prompt.

    If `prefill` is set, KV blocks and the first token come from that peer; otherwise the worker
    prefills locally. If an earlier attempt gave the output's first token, `cached_tokens` is the
    number of prompt tokens that it had cached. `retention` says how long the blocks should stay
    cached after the request.
    """

    cached_tokens: Count = 0
    prefill: KvPeer | None = None
    retention: RetentionHint | None = None


class Prefill(NewAttempt, frozen=True, kw_only=True):
    """Router to prefill worker: compute this prompt, stream its blocks, sample one token.

    `target` is the id of the decode worker that continues; "" if it does not matter.
    """

    target: Text = ""


class Abort(Message, frozen=True, kw_only=True):
    """Router to worker, or sink to source: drop this attempt now. A sink names the `part`."""

    request_id: RequestId
    attempt: Count
    part: Dimension = 0
    reason: Reason = ""


class Resume(Message, frozen=True, kw_only=True):
    """Router to decode worker: if you keep this stream, continue it for me as this attempt.

    The answer is Resumed or NotKept. A worker keeps a stream whose Generate was resumable if its
    router is lost, if it has finished, or if it runs for another router, which is then told that
    its attempt ended.
    """

    request_id: RequestId
    attempt: Count


class HandOver(Message, frozen=True, kw_only=True):
    """Router to decode worker: end your part of this attempt between two steps, and keep its KV
    for `next_attempt`, which continues on another decode worker. The answer is HandedOver."""

    request_id: RequestId
    attempt: Count
    next_attempt: Count


class CacheDumpRequest(Message, frozen=True, kw_only=True):
    """Router to worker: send the hashes of all blocks you hold, in pieces.

    The answer is one piece, with the same `nonce`. After it, the router asks for the next one:
    `first` is the number of the list's hashes that it already has. At 0, a new list begins.
    """

    nonce: Count = 0
    first: Count = 0


class CacheDump(Message, frozen=True, kw_only=True):
    """Answer to CacheDumpRequest: a piece of the list of all blocks, from place `first` on.

    The list is as of the event number `seq`: events with a higher number are applied to it. A
    worker that no longer has the requested list sends the first piece of a new one. The list ends
    with the `num_host` blocks in host memory below the pool, and after these the `num_disk` on
    disk.
    """

    incarnation: Text
    seq: Count
    hashes: Hashes
    nonce: Count = 0
    first: Count = 0
    is_last: bool = True
    num_host: Count = 0
    num_disk: Count = 0


class FlightRequest(Message, frozen=True, kw_only=True):
    """Router to worker: send a page of your flight recorder, from the place `after` on.

    The page has only events between `since_us` and `until_us` (0: now) by the worker's clock, and
    with a `request_id` none of other requests. `nonce` comes back in the answer, FlightPage.
    """

    nonce: Count
    after: Count = 0
    request_id: RequestId = ""
    since_us: Signed = 0
    until_us: Signed = 0


class FlightPage(Message, frozen=True, kw_only=True):
    """Answer to FlightRequest. The next page begins `after` this place; 0 if this page is the
    last."""

    nonce: Count
    after: Count
    events: Annotated[list[FlightEvent], Meta(max_length=16_384)]


# -- workers to router ----------------------------------------------------------------------


class SequenceTokens(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one sequence; `index` is the first one's index in the whole output.

    `cached_tokens` comes with an attempt's first token: the number of prompt tokens that were not
    computed by the attempt that gave the output's first token. `prompt_logprobs` come with the
    output's first token if they were requested.
    """

    request_id: RequestId
    attempt: Count
    index: Count
    token_ids: TokenIds
    logprobs: Logprobs | None = None
    finish: FinishReason | None = None
    cached_tokens: Count | None = None
    prompt_logprobs: PromptLogprobs | None = None
    trace: DecodeTrace | None = None


class StepTokens(Message, frozen=True, kw_only=True):
    """Decode worker to one router: all tokens that a step produced for its requests."""

    sequences: Annotated[list[SequenceTokens], Meta(max_length=65_536)]


class SampledToken(Message, frozen=True, kw_only=True):
    """The token that was sampled after a prompt's last chunk; `index` is that in the whole
    output."""

    request_id: RequestId
    attempt: Count
    index: Count
    token_id: TokenId
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish: FinishReason | None = None


class FirstToken(SampledToken, frozen=True, kw_only=True):
    """Prefill worker to router: the first token, sent without waiting for any transfer."""

    trace: PrefillTrace


class Resumed(Message, frozen=True, kw_only=True):
    """Decode worker to router: all tokens of the stream so far; later ones come as StepTokens.

    `finish` and `trace` are set if the stream has finished. `cached_tokens` is as in
    SequenceTokens.
    """

    request_id: RequestId
    attempt: Count
    token_ids: TokenIds
    logprobs: Logprobs | None = None
    finish: FinishReason | None = None
    cached_tokens: Count = 0
    trace: DecodeTrace | None = None


class NotKept(Message, frozen=True, kw_only=True):
    """Decode worker to router: the stream that you want to resume is not here."""

    request_id: RequestId
    attempt: Count


class PrefillDone(Message, frozen=True, kw_only=True):
    """Prefill worker to router: the handoff closed; carries the complete trace."""

    request_id: RequestId
    attempt: Count
    trace: PrefillTrace


class HandedOver(Message, frozen=True, kw_only=True):
    """Decode worker to router: my part has ended; all its tokens were sent before.

    With `keeps_kv`, the handoff `(request_id, next_attempt)` stays open here until it closes or an
    Abort names it. Its prompt is the request's prompt and its first `num_output - 1` output tokens;
    its first token is the next one. PrefillDone or AttemptFailed, with `next_attempt`, follows.
    """

    request_id: RequestId
    attempt: Count
    next_attempt: Count
    num_output: Count
    keeps_kv: bool
    trace: DecodeTrace


class AttemptFailed(Message, frozen=True, kw_only=True):
    """Worker to router: this attempt failed here.

    - `retryable`: another attempt may succeed.
    - `lacks_room`: it failed only because this worker has no room for it now.
    - `code`: the request itself is at fault, as `protocol.errors.UnusableConstraint` says; "" if
      not.
    - `computed_tokens`: prompt tokens that the worker has computed.
    """

    request_id: RequestId
    attempt: Count
    worker_id: Text
    reason: Reason
    retryable: bool
    lacks_room: bool = False
    code: Text = ""
    computed_tokens: Count = 0
