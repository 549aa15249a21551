"""A fleet over the doctor's window: all input of the rules.

Made of plain values, so that an observation can be recorded as JSON and examined again. A value
that was not measured is None, and no rule concludes anything from it. Times `_us` are microseconds
of the Unix epoch, durations `_ms` milliseconds, rates `_per_s` per second.
"""

from __future__ import annotations

import msgspec

from console.doctor.facts import Facts
from protocol.messages import Role

WINDOW_S = 600
MIN_REQUESTS = 100
"""The fewest finished requests for which percentiles are used."""
FEW_REQUESTS = 20
"""The fewest finished requests for which a median is used."""


class _Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class StepModelFacts(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """Coefficients of `scheduling.step_model`, in microseconds."""

    fixed_us: float
    per_token_us: float
    per_attended_us: float

    def predict_ms(self, num_tokens: float, attended: float) -> float:
        """Time of a step with `num_tokens` tokens that attend `attended` (query, key) pairs."""
        work = self.per_token_us * num_tokens + self.per_attended_us * attended
        return (self.fixed_us + work) / 1000


class WorkerFacts(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """One worker; numbers are means over the window.

    `num_steps` steps took `step_ms` each and had `step_tokens` tokens, which attended about
    `step_attended` (query, key) pairs. `hit_rate` is the share of `prompt_tokens` prompt tokens
    that came from its cache. `joined_us` is 0 if it joined before the router started. Each of its
    ranks, `tensor_parallel` in a stage, computed layers for `rank_busy_us`.

    `late_steps` steps ran in the last half minute or so. `late_model` is the fastest step model
    that the worker reported in this time; None if it has reported for a shorter time.
    """

    worker_id: str
    role: Role
    state: str = "ready"
    joined_us: int = 0
    num_waiting: float = 0.0
    num_running: float = 0.0
    max_batch_size: int | None = None
    blocks_total: int = 0
    blocks_used: float = 0.0
    num_steps: int = 0
    step_ms: float | None = None
    step_tokens: float | None = None
    step_attended: float | None = None
    step_model: StepModelFacts | None = None
    late_steps: int = 0
    late_model: StepModelFacts | None = None
    hit_rate: float | None = None
    prompt_tokens: int = 0
    evictions_per_s: float | None = None
    preemptions: int = 0
    losses: int = 0
    tensor_parallel: int = 1
    rank_busy_us: tuple[int, ...] = ()

    @property
    def is_full_of_sequences(self) -> bool:
        """Whether its batch has hardly a place left."""
        limit = self.max_batch_size
        return limit is not None and self.num_running >= 0.9 * limit

    @property
    def used_share(self) -> float:
        """Share of its KV blocks in use."""
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0


class PairFacts(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """The blocks sent from a prefill worker to a decode worker. `narrowed` workers forbid the
    expected path by `UCX_TLS`."""

    prefill: str
    decode: str
    path: str | None = None
    expected_path: str | None = None
    bytes_moved: int = 0
    busy_bytes_per_s: float | None = None
    is_below_way: bool = False  # slower than `expected_path` allows
    narrowed: tuple[str, ...] = ()
    exposed_p95_ms: float | None = None


class RequestFacts(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """A finished request. `first` and `rest` are milliseconds by stage (`router.requests.stages`),
    up to the first token and after it.

    - `cached_tokens`: tokens from the cache of the worker that computed its prompt; its placement
      expected `expected_cached_tokens` there.
    - `decode_cached_tokens`: tokens that did not have to move, because its decode worker had them.
    - `early_step_ms`, `late_step_ms`: medians over the first and the last quarter of its decode
      steps, None for short outputs.
    - `failed_attempts`: for each attempt that failed, the workers that it was placed on.
    - `num_long_steps`: how many of its `num_steps` decode steps took over twice their median;
      `num_long_shared_steps` of the long ones computed prompt tokens of other requests.
      `long_step_ms` is the median of the long ones, None if there are none.
    """

    received_us: int
    key: str = ""
    outcome: str = "finished"
    num_attempts: int = 1
    failed_attempts: tuple[tuple[str, ...], ...] = ()
    prefill: str | None = None
    decode: str | None = None
    num_prompt_tokens: int = 0
    cached_tokens: int = 0
    expected_cached_tokens: int = 0
    decode_cached_tokens: int = 0
    num_output_tokens: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    first: dict[str, float] = {}
    rest: dict[str, float] = {}
    num_steps: int = 0
    num_long_steps: int = 0
    num_long_shared_steps: int = 0
    long_step_ms: float | None = None
    early_step_ms: float | None = None
    late_step_ms: float | None = None

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return max(1, self.num_prompt_tokens - self.cached_tokens)


class MissPoint(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """The share of prompt blocks that a cache of `blocks` would miss."""

    blocks: int
    miss_ratio: float


class Targets(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """The operator's targets: milliseconds, and the share of requests that meet them."""

    ttft_ms: float = 1000.0
    tpot_ms: float = 50.0
    goodput: float = 0.95


class Observation(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """A fleet over the last `window_s` seconds. `miss_curve` is that of the decode pool's caches,
    which now have `cache_blocks` blocks. The pressures are those of `GET /fleet`; `short` names the
    pools that they show to be short. `settings` has the values that the router knows, by name.
    `facts` are those at `now_us`."""

    now_us: int
    window_s: float = WINDOW_S
    workers: tuple[WorkerFacts, ...] = ()
    pairs: tuple[PairFacts, ...] = ()
    requests: tuple[RequestFacts, ...] = ()
    targets: Targets = Targets()
    pressure_prefill: float | None = None
    pressure_decode: float | None = None
    short: tuple[Role, ...] = ()
    cache_blocks: int | None = None
    miss_curve: tuple[MissPoint, ...] = ()
    settings: dict[str, str] = {}
    facts: Facts = Facts()
