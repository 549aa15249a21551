"""What the routing policy sees and says: workers, the request, the decision with its reasons."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Mode(StrEnum):
    """Where the KV comes from: the decode worker computes the prompt itself, a prefill worker does
    it for it, the decode worker that ran the request so far hands its blocks over, or it runs on
    where it did, for another router than before."""

    LOCAL = "local"
    REMOTE = "remote"
    HANDOVER = "handover"
    RESUME = "resume"


class WorkerLoad(msgspec.Struct, frozen=True, gc=False):
    """One worker as a placement sees it.

    `queued_tokens` are prompt tokens still to compute there, `num_requests` its waiting and
    running requests. `held_blocks` and `expected_blocks` are leading blocks of this prompt in
    its cache: now, and once the prompts that were just routed there are computed. `max_context`
    bounds a prompt and its output together.
    """

    worker_id: str
    num_requests: int
    queued_tokens: int
    blocks_total: int
    blocks_used: int
    held_blocks: int
    expected_blocks: int
    max_context: int


class PlacementQuery(msgspec.Struct, frozen=True, gc=False):
    """What is to be placed: `num_tokens` that are known, `max_tokens` with all output to come.

    `exclude` failed this request before; `prefer_decode` holds a part.
    """

    num_tokens: int
    max_tokens: int
    block_size: int
    exclude: frozenset[str] = frozenset()
    prefer_decode: str | None = None


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that was weighed, in tokens; the lowest cost wins.

    `missing_tokens` are not in its cache now; `recompute_tokens` will not be there either when
    the prompt's turn comes; `shortage_tokens` do not fit into its free memory.
    """

    worker_id: str
    cost: int
    load_tokens: int
    missing_tokens: int
    recompute_tokens: int
    shortage_tokens: int


class Placement(msgspec.Struct, frozen=True, gc=False):
    """The decision, and everything that was weighed for it."""

    mode: Mode
    decode: Candidate
    prefill: Candidate | None
    reason: str
    decode_candidates: tuple[Candidate, ...]
    prefill_candidates: tuple[Candidate, ...]
    excluded: tuple[str, ...]
