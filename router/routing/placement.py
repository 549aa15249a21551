"""The routing policy's input and output: workers, the request, the decision with its reasons."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from router.routing.pace import Pace
from router.routing.prediction import WorkerSpeed

USUAL_OUTPUT_TOKENS = 128
"""The assumed length of an output of which nothing is known."""


class Mode(StrEnum):
    """Where the KV comes from. LOCAL: the decode worker computes the prompt. REMOTE: a prefill
    worker computes it. HANDOVER: the former decode worker hands its blocks over. RESUME: the
    request continues on its decode worker, for another router than before."""

    LOCAL = "local"
    REMOTE = "remote"
    HANDOVER = "handover"
    RESUME = "resume"


class Targets(msgspec.Struct, frozen=True, gc=False):
    """The most milliseconds to the first token, and for each later one; None: any."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


NO_TARGETS = Targets()


class WorkerLoad(msgspec.Struct, frozen=True, gc=False):
    """One worker as a placement sees it, whatever the prompt.

    - `queued_tokens`: prompt tokens still to compute there.
    - `num_requests`: its waiting and running requests; `max_batch`: how many may run, or 0.
    - `blocks_claimed`: blocks in use, waited for or reserved; `blocks_stuck` of them do not come
      back by themselves.
    - `max_context`: the most tokens of a prompt and its output together.
    - `host_block_us`, `disk_block_us`: the time to load a block from its tiers.
    - `speed`: as reported; `pace`: as it is believed, under this load.
    """

    worker_id: str
    num_requests: int
    queued_tokens: int
    blocks_total: int
    blocks_claimed: int
    blocks_stuck: int
    max_context: int
    pace: Pace
    max_batch: int = 0
    host_block_us: int = 0
    disk_block_us: int = 0
    speed: WorkerSpeed | None = None


class HeldElsewhere(msgspec.Struct, frozen=True, gc=False):
    """The most leading blocks that a worker holds now, that worker's id, and the most that any
    other worker holds."""

    holder: str
    most: int
    second: int

    def beside(self, worker_id: str) -> int:
        """The most that a worker other than this one holds."""
        return self.second if worker_id == self.holder else self.most


class PlacementQuery(msgspec.Struct, frozen=True, gc=False):
    """A request to place: `num_tokens` so far, `max_tokens` including all output to come, of which
    `output_tokens` are expected.

    - `exclude` are workers where the request failed; `prefer_decode` already holds some blocks.
    - `elsewhere` has the blocks that workers may fetch from each other; None: they fetch nothing.
    - With `by_load`, only load and room decide, not the blocks that a worker holds.
    - `session_workers` served the request's session last: they win near-ties.
    - `local_threshold_tokens`: only decode workers that lack no more tokens may compute the prompt
      while a prefill worker can.
    - `targets`: what the request should meet.
    """

    num_tokens: int
    max_tokens: int
    block_size: int
    exclude: frozenset[str] = frozenset()
    prefer_decode: str | None = None
    elsewhere: HeldElsewhere | None = None
    by_load: bool = False
    session_workers: frozenset[str] = frozenset()
    local_threshold_tokens: int | None = None
    output_tokens: int = USUAL_OUTPUT_TOKENS
    targets: Targets = NO_TARGETS


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A worker and what it would cost to use it, in milliseconds of everybody's time; the lowest
    cost wins. A prefill worker and a decode worker share the cost of a pair; a decode worker that
    computes the prompt itself bears all of it.

    `missing_tokens` are not in its cache now; `recompute_tokens` will still be missing when the
    prompt's turn comes, and `fetch_tokens` of these can be loaded from its own tiers or fetched
    from another worker; `shortage_tokens` do not fit into its free memory. The parts of the cost:

    - `wait_ms`, `fetch_ms`, `compute_ms`: prompts that come first, loading and fetching,
      computing. With `room_ms`, until memory and a place are free, they make up `ttft_ms` if the
      prompt is computed here.
    - `handoff_ms`: the KV comes here after the first token. `decode_ms`: the expected output, whose
      tokens take `tpot_ms` as long as nobody leaves; prompts that wait here slow them.
    - `delay_ms`: the time that requests which run here lose, weighted.
    """

    worker_id: str
    cost_ms: float
    missing_tokens: int
    recompute_tokens: int
    fetch_tokens: int = 0
    shortage_tokens: int = 0
    ttft_ms: float | None = None
    wait_ms: float = 0.0
    fetch_ms: float = 0.0
    compute_ms: float = 0.0
    room_ms: float = 0.0
    handoff_ms: float = 0.0
    decode_ms: float = 0.0
    tpot_ms: float = 0.0
    delay_ms: float = 0.0


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
    APART = "no_pair"
    """Prefill workers may take the prompt, but none can hand over to this decode worker."""
    NOT_CACHED = "not_cached"
    """No decode worker holds a part of the prompt."""
    SPARE = "spare_decode_worker"
    """No pair meets the targets, but a decode worker that computes the prompt itself does."""
    DRAIN = "drain"
    """The request's former decode worker drains."""
    KEPT = "kept_stream"
    """The request's former decode worker kept the stream."""


class Alternative(msgspec.Struct, frozen=True, gc=False):
    """The best placement of the other kind, which was not chosen: local if the chosen one is
    remote, and the reverse."""

    prefill: str | None
    decode: str
    cost_ms: float
    ttft_ms: float


class Placement(msgspec.Struct, frozen=True, gc=False):
    """The decision, with every candidate that was considered. `reason` is `rule` in words.

    Costs within `tie_ms` of the lowest count as equally good. `ttft_ms`, `tpot_ms` and `cost_ms`
    are predictions; `ttft_ms` is None if the worker has not reported a step model, or if nothing is
    computed. `meets_targets` is None without targets. `left_out` names the pairs that were left out
    because they cannot hand over; "" if there are none.
    """

    mode: Mode
    decode: Candidate
    prefill: Candidate | None
    reason: str
    decode_candidates: tuple[Candidate, ...]
    prefill_candidates: tuple[Candidate, ...]
    excluded: tuple[str, ...]
    rule: Rule = Rule.NOT_CACHED
    cost_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tie_ms: float = 0.0
    meets_targets: bool | None = None
    alternative: Alternative | None = None
    left_out: str = ""
