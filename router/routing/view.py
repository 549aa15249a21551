"""The routing policy's input and output: workers, the request, the decision with its reasons."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from router.routing.prediction import WorkerSpeed


class Mode(StrEnum):
    """Where the KV comes from. LOCAL: the decode worker computes the prompt. REMOTE: a prefill
    worker computes it. HANDOVER: the former decode worker hands its blocks over. RESUME: the
    request continues on its decode worker, for another router than before."""

    LOCAL = "local"
    REMOTE = "remote"
    HANDOVER = "handover"
    RESUME = "resume"


class WorkerLoad(msgspec.Struct, frozen=True, gc=False):
    """One worker as a placement sees it.

    - `queued_tokens`: prompt tokens still to compute there.
    - `num_requests`: its waiting and running requests.
    - `blocks_claimed`: blocks in use, waited for or reserved; `blocks_stuck` of them do not come
      back by themselves.
    - `held_blocks`, `expected_blocks`: leading blocks of this prompt in its cache: now, and once
      the prompts recently routed there are computed.
    - `max_context`: the most tokens of a prompt and its output together.
    - `speed`: for predictions only.
    """

    worker_id: str
    num_requests: int
    queued_tokens: int
    blocks_total: int
    blocks_claimed: int
    blocks_stuck: int
    held_blocks: int
    expected_blocks: int
    max_context: int
    speed: WorkerSpeed | None = None


class HeldElsewhere(msgspec.Struct, frozen=True, gc=False):
    """The most leading blocks that a worker holds now, whose they are, and the next worker's."""

    holder: str
    most: int
    second: int

    def beside(self, worker_id: str) -> int:
        """The most that a worker other than this one holds."""
        return self.second if worker_id == self.holder else self.most


class PlacementQuery(msgspec.Struct, frozen=True, gc=False):
    """A request to place: `num_tokens` so far, `max_tokens` including all output to come.

    - `exclude` are workers where the request failed; `prefer_decode` already holds some blocks.
    - `elsewhere` has the blocks that workers may fetch from each other; None: they fetch nothing.
    - With `by_load`, only load and room decide, not the blocks that a worker holds.
    - `session_workers` served the request's session last: they win near-ties.
    """

    num_tokens: int
    max_tokens: int
    block_size: int
    exclude: frozenset[str] = frozenset()
    prefer_decode: str | None = None
    elsewhere: HeldElsewhere | None = None
    by_load: bool = False
    session_workers: frozenset[str] = frozenset()


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A worker with its cost, in tokens; the lowest cost wins.

    `missing_tokens` are not in its cache now; `recompute_tokens` will still be missing when the
    prompt's turn comes, and `fetch_tokens` of these can be fetched from another worker;
    `shortage_tokens` do not fit into its free memory.
    """

    worker_id: str
    cost: int
    load_tokens: int
    missing_tokens: int
    recompute_tokens: int
    shortage_tokens: int
    fetch_tokens: int = 0


class Rule(StrEnum):
    """The rule of the policy that decided."""

    NEAR = "near_prefix"
    """A decode worker holds a part of the prompt, and computing the rest there costs least."""
    LOADED = "near_prefix_loaded"
    """A decode worker holds a part of the prompt, but a pair of other workers costs less."""
    NO_PREFILL = "no_prefill_worker"
    """No prefill worker is ready."""
    PREFILL_UNFIT = "no_fitting_prefill_worker"
    """Prefill workers are ready, but none may take the prompt."""
    NOT_CACHED = "not_cached"
    """No decode worker holds a part of the prompt."""
    DRAIN = "drain"
    """Its decode worker drains."""
    KEPT = "kept_stream"
    """Its decode worker kept the stream."""


class Placement(msgspec.Struct, frozen=True, gc=False):
    """The decision, with every candidate that was considered. `reason` is `rule` in words."""

    mode: Mode
    decode: Candidate
    prefill: Candidate | None
    reason: str
    decode_candidates: tuple[Candidate, ...]
    prefill_candidates: tuple[Candidate, ...]
    excluded: tuple[str, ...]
    rule: Rule = Rule.NOT_CACHED
