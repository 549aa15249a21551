"""From a generation to its next attempt: its workers, the load reserved on them, its start
messages.

Joins the fleet's snapshot with the placement policy. Sends nothing. The only state about earlier
requests is how urgent they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from protocol.errors import Overloaded, PromptTooLong
from protocol.hashing import ChainStart, chain_start, more_hashes, seed_of
from protocol.messages import Generate, Prefill, Role
from protocol.sampling import SamplingParams
from router.fleet.election import FleetIdentity
from router.fleet.fetch_hints import MAX_ATTEMPT, holders_for, peer_of
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.requests.hash_thread import hash_in_thread
from router.requests.interface import GenerationRequest
from router.requests.machine.attempt import Attempt
from router.requests.machine.generation import Generation
from router.requests.measurements import Experience
from router.requests.prompt_hashes import LONG_PROMPT_TOKENS
from router.requests.waiting_ahead import check_deadline, check_targets
from router.routing.decision import Charge, Decision, Query, apply, decide
from router.routing.placement import NO_TARGETS, Mode, Placement, Targets
from router.routing.urgent_work import UrgentWork
from router.settings import BY_LOAD, ON, RoutingSettings

PlacedListener = Callable[[Sequence[bytes], Placement, int], None]
"""Called with the block hashes of a newly placed prompt, its placement, and the block size."""


class Launcher:
    """Opens attempts on the workers of a fleet."""

    def __init__(
        self,
        settings: RoutingSettings,
        fleet: Fleet,
        rng: random.Random,
        experience: Experience,
        on_placed: PlacedListener | None = None,
    ) -> None:
        self._on_placed = on_placed
        self._experience = experience
        self._local_threshold = settings.local_prefill_threshold_tokens
        self._fetches = settings.kv_fetch == ON
        self._by_load = settings.placement == BY_LOAD
        self._fleet, self._view = fleet, fleet.view()
        self._rng = rng
        self._seed = seed_of(settings.cluster_secret)
        self._urgent = UrgentWork()
        self.targets: Callable[[], Targets] = lambda: NO_TARGETS
        """The targets of requests that have none of their own."""

    def check_length(self, request: GenerationRequest) -> None:
        """Raises PromptTooLong for more tokens than any ready decode worker accepts."""
        needed, limit = len(request.token_ids), self._fleet.max_context
        output = 1 if request.is_open_ended else request.sampling.max_tokens
        if limit is not None and needed + output > limit:
            raise PromptTooLong(limit, needed, output)

    def is_long(self, generation: Generation) -> bool:
        """Whether the prompt is so long that `prepare` must hash its blocks in a thread and `open`
        takes milliseconds."""
        return len(generation.request.token_ids) > LONG_PROMPT_TOKENS

    async def prepare(self, generation: Generation) -> None:
        """Hash the blocks of a long prompt in advance of `open`."""
        identity, request = self._fleet.identity, generation.request
        if identity is not None:
            start = self._start(generation, identity)
            block_size = identity.block_size
            await hash_in_thread(request.hashes, request.token_ids, start, block_size)

    def wait_s(self, generation: Generation) -> float:
        """How long to wait before `open`, so that routers do not all place at once."""
        return self._view.wait_s if generation.num_attempts == 1 else 0.0

    def open(
        self,
        generation: Generation,
        source: Worker | None = None,
        running: Iterable[Generation] = (),
    ) -> Attempt:
        """Choose workers for the generation's next attempt and reserve its load on them.

        `source` is the decode worker that hands the request over. It has the KV of all tokens but
        the newest, and sends that token as the next attempt's first one. `running` are the other
        generations. Raises Overloaded when no decode worker is ready, when only workers that are
        not ready are large enough, or when a first attempt cannot meet its deadline. Raises
        PromptTooLong when no known worker is large enough.
        """
        identity = self._fleet.identity
        if identity is None:
            raise Overloaded(self._fleet.not_ready_reason() or "no worker is registered")
        first_index = len(generation.stream.token_ids) - (source is not None)
        query = self._query(generation, identity, first_index, source)
        view, now = self._fleet.view(), self._fleet.now()
        try:
            decision = decide(view, query, now, self._rng)
        except (Overloaded, PromptTooLong):
            self._check_ready(query.max_tokens)
            raise
        placement = decision.placement
        if source is None and generation.num_attempts == 1:
            self._admit(generation, decision, running, view.others_share, now)
        attempt = self._attempt(generation, first_index, decision, apply(view, decision, now))
        generation.session = decision.session
        attempt.prefill = attempt.prefill or source
        if decision.matches and query.may_fetch and source is None:
            computing, failed = attempt.prefill or attempt.decode, generation.failures.failed
            attempt.holders = holders_for(
                self._fleet, decision.matches, computing, attempt.decode, failed, self._rng
            )
        if self._on_placed is not None and generation.num_attempts == 1:
            self._on_placed(query.hashes, placement, identity.block_size)
        return attempt

    def _admit(
        self,
        generation: Generation,
        decision: Decision,
        running: Iterable[Generation],
        others_share: float,
        now: float,
    ) -> None:
        """Raises Overloaded if a first attempt would be late."""
        request, placement, loads = generation.request, decision.placement, decision.loads
        check_deadline(generation, placement, loads, running, now)
        check_targets(generation, placement, loads, running, self._urgent, others_share)
        computing = placement.prefill or placement.decode
        self._urgent.note(request.share, request.priority, computing.recompute_tokens)

    def _hashes(
        self, generation: Generation, identity: FleetIdentity, first_index: int
    ) -> list[bytes]:
        """Hashes of the full blocks of the prompt and the output before `first_index`."""
        request, start = generation.request, self._start(generation, identity)
        hashes = request.hashes.of(request.token_ids, start, identity.block_size)
        if not first_index:
            return hashes
        tokens = request.token_ids + generation.stream.token_ids[:first_index]
        return more_hashes(hashes, start, tokens, identity.block_size)

    def _start(self, generation: Generation, identity: FleetIdentity) -> ChainStart:
        request = generation.request
        return chain_start(
            identity.model_fingerprint,
            request.cache_salt,
            self._seed,
            request.shared_tokens,
            identity.block_size,
        )

    def _check_ready(self, max_tokens: int) -> None:
        """Raises Overloaded if no worker is ready, or if only workers that are not ready are large
        enough."""
        ready = [each.info.max_context for each in self._fleet.ready(Role.DECODE)]
        if not ready:
            raise Overloaded(self._fleet.not_ready_reason() or "no decode worker is ready")
        if max(ready) < max_tokens <= (self._fleet.max_context or 0):
            raise Overloaded(
                f"prompt and output may have {max_tokens} tokens; the only decode worker "
                f"that accepts that many is not ready; the others accept {max(ready)}"
            )

    def _query(
        self,
        generation: Generation,
        identity: FleetIdentity,
        first_index: int,
        source: Worker | None,
    ) -> Query:
        request, failures = generation.request, generation.failures
        is_scored = request.sampling.prompt_logprobs is not None
        return Query(
            num_tokens=len(request.token_ids) + first_index,
            max_tokens=generation.needed_context,
            block_size=identity.block_size,
            hashes=self._hashes(generation, identity, first_index),
            uses_cache=not is_scored or first_index > 0 or source is not None,
            failed=frozenset(failures.failed),
            only=request.only_workers,
            prefer_decode=failures.prefer_decode,
            source=None if source is None else source.worker_id,
            may_fetch=self._fetches and generation.num_attempts <= MAX_ATTEMPT,
            by_load=self._by_load,
            local_threshold_tokens=self._local_threshold,
            session=request.session,
            inferred=generation.session,
            targets=self._targets(request),
            output_tokens=self._experience.outputs.expected(generation.most_output_left),
        )

    def _targets(self, request: GenerationRequest) -> Targets:
        usual = self.targets()
        ttft_ms, tpot_ms = request.ttft_target_ms, request.tpot_target_ms
        if ttft_ms is None and tpot_ms is None:
            return usual
        return Targets(ttft_ms or usual.ttft_ms, tpot_ms or usual.tpot_ms)

    def _attempt(
        self,
        generation: Generation,
        first_index: int,
        decision: Decision,
        reservations: list[Charge],
    ) -> Attempt:
        decode, prefill = decision.placement.decode, decision.placement.prefill
        return Attempt(
            number=generation.attempt_number,
            first_index=first_index,
            placement=decision.placement,
            decode=self._chosen(decode.worker_id),
            prefill=None if prefill is None else self._chosen(prefill.worker_id),
            reservations=reservations,
            block_size=decision.query.block_size,
            session=decision.session,
        )

    def _chosen(self, worker_id: str) -> Worker:
        worker = self._fleet.worker(worker_id)
        assert worker is not None, "decisions choose among the fleet's own workers"
        return worker


def _sampling(generation: Generation, attempt: Attempt) -> SamplingParams:
    """The request's sampling. An open-ended output ends with the decode worker's context."""
    request, sampling = generation.request, generation.request.sampling
    room = attempt.decode.info.max_context - len(request.token_ids)
    if not request.is_open_ended or sampling.max_tokens <= room:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=room)


def legs(
    generation: Generation, attempt: Attempt, trace_id: str | None, now: float
) -> list[tuple[Worker, Generate | Prefill]]:
    """The messages that start an attempt, each with its worker."""
    request, token_ids = generation.request, generation.request.token_ids
    if attempt.first_index:
        token_ids = token_ids + generation.stream.token_ids[: attempt.first_index]
    common: dict[str, Any] = {
        "request_id": request.request_id,
        "attempt": attempt.number,
        "token_ids": token_ids,
        "num_output": attempt.first_index,
        "sampling": _sampling(generation, attempt),
        "priority": request.priority,
        "deadline_ms": max(1, round((generation.deadline - now) * 1000)),
        "cache_salt": request.cache_salt,
        "shared_tokens": request.shared_tokens,
        "share": request.share,
        "session": attempt.session,
        "stays_in_pool": request.stays_in_pool,
        "is_resumable": request.is_resumable,
        "trace_id": trace_id or "",
    }
    source = attempt.prefill
    generate = Generate(
        prefill=None if source is None else peer_of(source),
        holders=attempt.holders if source is None else [],
        cached_tokens=generation.cached_tokens if generation.stream.token_ids else 0,
        retention=request.retention,
        **common,
    )
    if source is None or attempt.placement.mode is Mode.HANDOVER:
        return [(attempt.decode, generate)]
    prefill = Prefill(target=attempt.decode.worker_id, holders=attempt.holders, **common)
    return [(attempt.decode, generate), (source, prefill)]
