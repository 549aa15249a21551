"""From a generation to its next attempt: its workers, its load on them, its start messages.

Joins the fleet's snapshot with the placement policy. Sends nothing and keeps no state.
"""

from __future__ import annotations

import random
import time
from typing import Any

from protocol.errors import Overloaded, PromptTooLong
from protocol.hashing import block_hashes, chain_root
from protocol.messages import Generate, Prefill, PrefillPeer, Role
from router.fleet.fleet import Fleet, FleetIdentity
from router.fleet.worker import Worker
from router.requests.attempt import Attempt
from router.requests.generation import Generation
from router.requests.interface import GenerationRequest
from router.routing.policy import place, place_handover
from router.routing.view import Mode, Placement, PlacementQuery
from router.settings import RouterSettings


class Launcher:
    """Opens attempts on the workers of a fleet."""

    def __init__(self, settings: RouterSettings, fleet: Fleet, rng: random.Random) -> None:
        self._settings = settings
        self._fleet = fleet
        self._rng = rng

    def check_length(self, request: GenerationRequest) -> None:
        """Raises PromptTooLong for more tokens than every ready decode worker accepts."""
        needed, limit = len(request.token_ids), self._fleet.max_context
        if limit is not None and needed + request.sampling.max_tokens > limit:
            raise PromptTooLong(
                f"the context holds {limit} tokens, but {needed} in the prompt and up to "
                f"{request.sampling.max_tokens} of output were asked for"
            )

    def open(self, generation: Generation, source: Worker | None = None) -> Attempt:
        """Choose workers for the generation's next attempt and reserve its load on them.

        `source` is the decode worker that hands the request over. It has the KV of all tokens but
        the newest, and sends that token as the next attempt's first one. Raises Overloaded when
        there is no decode worker, PromptTooLong when none has the room.
        """
        identity, reason = self._fleet.identity, self._fleet.not_ready_reason()
        if identity is None or reason is not None:
            raise Overloaded(reason or "no worker is registered")
        first_index = len(generation.stream.token_ids) - (source is not None)
        tokens = generation.request.token_ids + generation.stream.token_ids[:first_index]
        salt = generation.request.cache_salt
        root = chain_root(identity.model_fingerprint, salt, self._settings.hash_seed)
        hashes = block_hashes(root, tokens, identity.block_size)
        query = self._query(generation, identity, len(tokens))
        is_scored = generation.request.sampling.prompt_logprobs is not None
        computes_all = is_scored and first_index == 0 and source is None
        useful = [] if computes_all else hashes
        loads = self._fleet.loads(Role.DECODE, useful)
        if source is None:
            prefill_loads = self._fleet.loads(Role.PREFILL, useful)
            threshold = self._settings.local_prefill_threshold_tokens
            placement = place(query, loads, prefill_loads, threshold, self._rng)
        else:
            placement = place_handover(query, source.worker_id, loads, self._rng)
        attempt = self._charge(generation.attempt_number, first_index, placement, hashes)
        attempt.prefill = attempt.prefill or source
        return attempt

    def _query(
        self, generation: Generation, identity: FleetIdentity, num_tokens: int
    ) -> PlacementQuery:
        excluded = (
            each.worker_id
            for role in (Role.PREFILL, Role.DECODE)
            for each in self._fleet.ready(role)
            if each.info.incarnation in generation.failures.failed
        )
        return PlacementQuery(
            num_tokens=num_tokens,
            max_tokens=generation.max_tokens,
            block_size=identity.block_size,
            exclude=frozenset(excluded if generation.failures.failed else ()),
            prefer_decode=generation.failures.prefer_decode,
        )

    def _charge(
        self, number: int, first_index: int, placement: Placement, hashes: list[bytes]
    ) -> Attempt:
        """Reserve load and note expected blocks, so that the next placement counts this one."""
        num_blocks = len(hashes) + 1
        decode = self._chosen(placement.decode.worker_id)
        local_tokens = placement.decode.missing_tokens if placement.mode is Mode.LOCAL else 0
        charges = [(decode, decode.reserve(local_tokens, num_blocks))]
        prefill = None
        if placement.prefill is not None:
            prefill = self._chosen(placement.prefill.worker_id)
            reserved = prefill.reserve(placement.prefill.recompute_tokens, num_blocks)
            charges.append((prefill, reserved))
        for worker, _ in charges:
            self._fleet.expect_cached(worker.worker_id, hashes)
        return Attempt(
            number=number,
            first_index=first_index,
            placement=placement,
            decode=decode,
            prefill=prefill,
            reservations=charges,
        )

    def _chosen(self, worker_id: str) -> Worker:
        worker = self._fleet.worker(worker_id)
        assert worker is not None, "placement chooses among the fleet's own workers"
        return worker


def legs(generation: Generation, attempt: Attempt) -> list[tuple[Worker, Generate | Prefill]]:
    """The messages that start an attempt, each with its worker."""
    request = generation.request
    common: dict[str, Any] = {
        "request_id": request.request_id,
        "attempt": attempt.number,
        "token_ids": request.token_ids + generation.stream.token_ids[: attempt.first_index],
        "num_output": attempt.first_index,
        "sampling": request.sampling,
        "priority": request.priority,
        "deadline_ms": max(1, round((generation.deadline - time.monotonic()) * 1000)),
        "cache_salt": request.cache_salt,
        "is_resumable": request.is_resumable,
    }
    if attempt.prefill is None:
        return [(attempt.decode, Generate(**common))]
    source = attempt.prefill.info
    peer = PrefillPeer(
        worker_id=source.worker_id, incarnation=source.incarnation, control=source.control
    )
    generate = Generate(prefill=peer, **common)
    if attempt.placement.mode is Mode.HANDOVER:
        return [(attempt.decode, generate)]
    return [(attempt.decode, generate), (attempt.prefill, Prefill(**common))]
