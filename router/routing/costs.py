"""What it costs to use a worker for a prompt, in milliseconds of everybody's time.

Pure. The request's own time counts in full: waiting, fetching, computing, memory, the handoff, each
output token. The time that other requests lose is weighted: a worker that computes cannot compute
later prompts, and requests that decode there wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from router.routing.caches.cache_index import NO_MATCH, PrefixMatch
from router.routing.pairs import Pairs
from router.routing.placement import Candidate, PlacementQuery, WorkerLoad
from router.routing.prediction import US_PER_MS
from scheduling.step_model import attended_pairs

PREFILL_WEIGHT = 0.5
"""On a prefill worker, what computing costs later prompts, as a share of its time."""
DECODE_WEIGHT = 0.75
"""The same share on a decode worker, whose other work waits."""
DELAY_WEIGHT = 0.125
"""The weight of a millisecond that a running request loses, relative to one before a first token:
steps are kept below a target anyway."""
CROWD_SHARE = 0.5
"""The share of an output during which the requests that run now still run."""
TRANSFER_SHARE = 0.125
"""The time to move a token's KV, as a share of computing it, for pairs without a measurement."""
HANDOFF_MS = 2.0
"""The time that a handoff's messages take, in milliseconds."""
HANDOFF_TURNS = 3
"""Steps that have to end on the decode worker: before it asks, before it grants blocks, and, after
the first token, before it takes the request into its batch."""
FETCH_MS = 5.0
"""The time of a fetch besides moving blocks, in milliseconds: messages, and the holder's turn."""
LOAD_MS = 1.0
"""The time of loading from a tier besides copying blocks, in milliseconds: two turns of the
worker's loop."""
LAST_CHUNK_TOKENS = 512
"""The KV of earlier chunks moves while later ones are computed."""


class Costs:
    """The candidates of one query."""

    def __init__(
        self, query: PlacementQuery, matches: Mapping[str, PrefixMatch], pairs: Pairs
    ) -> None:
        self._query = query
        self._matches = matches
        self._pairs = pairs
        self._block_size, self._num_tokens = query.block_size, query.num_tokens
        self.num_blocks = self._room_blocks = blocks_of(query)
        self._in_windows = 0.0
        if pairs.has_windows:
            self._room_blocks += pairs.room_in_windows(self.num_blocks)
            self._in_windows = pairs.in_windows(self.num_blocks)
        self._most_blocks = (query.num_tokens - 1) // query.block_size
        """The last token is always computed, because its logits are needed."""
        self._most_elsewhere = 0 if query.elsewhere is None else query.elsewhere.most
        self._decoding: dict[str, _Decoding] = {}
        # Many workers hold the same part of the prompt, and share a match.
        self._last_match: PrefixMatch | None = None
        self._last_needs = _Needs(0, 0, 0, False)

    def missing(self, held_blocks: int) -> int:
        """Prompt tokens that a worker with `held_blocks` leading blocks lacks."""
        most = self._most_blocks
        return self._num_tokens - self._block_size * (held_blocks if held_blocks < most else most)

    def prefill(self, loads: Iterable[WorkerLoad]) -> tuple[Candidate, ...]:
        """Prefill workers that compute the prompt."""
        matches, room_blocks, found = self._matches, self._room_blocks, []
        for load in loads:
            pace, match = load.pace, matches.get(load.worker_id, NO_MATCH)
            missing, recompute, fetched, fetch_ms, compute_ms, work_ms = self._prompt(load, match)
            lacking = room_blocks - load.blocks_total + load.blocks_claimed
            shortage = self._shortage(lacking, match) if lacking > 0 else 0
            wait_ms, room_ms = pace.wait_ms, shortage * pace.per_token_us / US_PER_MS
            ttft_ms = wait_ms + fetch_ms + compute_ms + room_ms
            delay_ms = PREFILL_WEIGHT * work_ms
            candidate = Candidate(
                load.worker_id, ttft_ms + delay_ms, missing, recompute, fetched, shortage, ttft_ms,
                wait_ms, fetch_ms, compute_ms, room_ms, 0.0, 0.0, 0.0, delay_ms,
            )  # fmt: skip
            found.append(candidate)
        return tuple(found)

    def local(self, loads: Iterable[WorkerLoad], alone: bool) -> tuple[Candidate, ...]:
        """Decode workers that compute the prompt themselves. `alone`: no prefill worker could."""
        matches, found = self._matches, []
        weight = PREFILL_WEIGHT
        is_shared = not alone and self._query.local_threshold_tokens is None
        for load in loads:
            match = matches.get(load.worker_id, NO_MATCH)
            missing, recompute, fetched, fetch_ms, compute_ms, work_ms = self._prompt(load, match)
            shortage, room_ms, output_ms, tpot_ms, delay_ms = self._decode(load, match)
            wait_ms = load.pace.wait_ms
            ttft_ms = wait_ms + fetch_ms + compute_ms + room_ms
            if is_shared:
                weight = DECODE_WEIGHT + DELAY_WEIGHT * load.num_requests
            delay_ms += weight * work_ms
            candidate = Candidate(
                load.worker_id, ttft_ms + output_ms + delay_ms, missing, recompute, fetched,
                shortage, ttft_ms, wait_ms, fetch_ms, compute_ms, room_ms, 0.0, output_ms, tpot_ms,
                delay_ms,
            )  # fmt: skip
            found.append(candidate)
        return tuple(found)

    def remote(self, loads: Iterable[WorkerLoad], begins_ms: float) -> tuple[Candidate, ...]:
        """Decode workers that get the KV from another worker, which has the first token after
        `begins_ms` at the earliest."""
        matches, decoding, by_load = self._matches, self._decoding, self._query.by_load
        usual, last, found = self._pairs.usual_ms_per_block, None, []
        missing, recompute, moving_ms = 0, 0, 0.0
        more_tokens = max(1, self._query.output_tokens - 1)
        for load in loads:
            name, pace = load.worker_id, load.pace
            match = matches.get(name, NO_MATCH)
            if match is not last:
                last, (missing, recompute, _, _) = match, self._needs(match)
                moving_ms = self._moving_ms(recompute, begins_ms)
            shortage, room_ms, output_ms, tpot_ms, delay_ms = decoding.get(name) or self._decode(
                load, match
            )
            wait_ms, step_ms, handoff_ms = pace.wait_ms, tpot_ms, 0.0
            if wait_ms:
                wait_ms, step_ms, tpot_ms = self._beside_prompts(load, tpot_ms)
            if not by_load:
                turns_ms = HANDOFF_TURNS * step_ms - begins_ms
                handoff_ms = HANDOFF_MS + (turns_ms if turns_ms > step_ms else step_ms)
                if usual is None:
                    moving_ms = TRANSFER_SHARE * recompute * pace.per_token_us / US_PER_MS
                handoff_ms += moving_ms
            late_ms = handoff_ms if room_ms <= begins_ms else handoff_ms + (room_ms - begins_ms)
            candidate = Candidate(
                name, wait_ms + room_ms + handoff_ms + output_ms + delay_ms, missing, recompute, 0,
                shortage, None, wait_ms, 0.0, 0.0, room_ms, handoff_ms, output_ms,
                tpot_ms + late_ms / more_tokens, delay_ms,
            )  # fmt: skip
            found.append(candidate)
        return tuple(found)

    def _beside_prompts(self, load: WorkerLoad, tpot_ms: float) -> tuple[float, float, float]:
        """Where prompts wait: the time for which they delay an output at most, the time of a step
        with a part of them, and the time of a token of the output beside them."""
        pace, output = load.pace, self._query.output_tokens
        wait_ms = min(pace.wait_ms, output * pace.itl_target_ms)
        step_ms = pace.step_with_prompts_ms(load.queued_tokens)
        share = min(1.0, wait_ms / (output * step_ms))
        return wait_ms, step_ms, tpot_ms + share * max(0.0, step_ms - tpot_ms)

    def _moving_ms(self, recompute: int, begins_ms: float) -> float:
        """How long the KV still moves after the first token, by the measured pairs; 0 if no pair
        was measured. That is at least the time for the last chunk's blocks. It is more if earlier
        blocks have not arrived by then, for example because the other worker had most of the
        prompt cached."""
        usual, block_size = self._pairs.usual_ms_per_block or 0.0, self._block_size
        last = exposed_blocks(recompute, block_size) + self._in_windows
        return max(last * usual, -(-recompute // block_size) * usual - begins_ms)

    def _prompt(
        self, load: WorkerLoad, match: PrefixMatch
    ) -> tuple[int, int, int, float, float, float]:
        """The missing tokens, now and when the prompt's turn comes; how many of these are loaded or
        fetched, and how long that takes; the time from the first to the last chunk, and the work on
        the prompt in it."""
        missing, recompute, attended, may_fetch = self._needs(match)
        if self._query.by_load:
            return missing, recompute, 0, 0.0, 0.0, 0.0
        num_tokens, fetched, fetch_ms = recompute, 0, 0.0
        if may_fetch:
            fetched, fetch_ms = self._load(load, match, recompute)
            more, more_ms = self._fetch(load, recompute - fetched)
            fetched, fetch_ms = fetched + more, fetch_ms + more_ms
            num_tokens -= fetched
            attended = attended_pairs(num_tokens, self._num_tokens - num_tokens)
        compute_ms, work_ms = load.pace.prompt_ms(num_tokens, attended)
        return missing, recompute, fetched, fetch_ms, compute_ms, work_ms

    def _needs(self, match: PrefixMatch) -> _Needs:
        """What a worker with this match lacks."""
        if match is not self._last_match:
            held, soon = match.held, match.expected
            missing = recompute = self.missing(held)
            if soon > held:
                recompute = self.missing(soon)
            attended = attended_pairs(recompute, self._num_tokens - recompute)
            may_fetch = match.num_own > held or self._most_elsewhere > held
            self._last_needs = _Needs(missing, recompute, attended, may_fetch)
            self._last_match = match
        return self._last_needs

    def _load(self, load: WorkerLoad, match: PrefixMatch, missing: int) -> tuple[int, float]:
        """How many of the missing tokens the worker loads from its own tiers, and how long that
        takes. Blocks on disk are read into host memory first."""
        num_blocks = match.in_host + match.on_disk
        loaded = missing - self.missing(match.num_own)
        if not num_blocks or loaded <= 0:
            return 0, 0.0
        copied = num_blocks + self._pairs.in_windows(num_blocks)
        all_us = copied * load.host_block_us + match.on_disk * load.disk_block_us
        share = loaded / (num_blocks * self._query.block_size)
        load_ms = LOAD_MS + share * all_us / US_PER_MS
        compute_ms = loaded * load.pace.per_token_us / US_PER_MS
        return (loaded, load_ms) if load_ms < compute_ms else (0, 0.0)

    def _fetch(self, load: WorkerLoad, missing: int) -> tuple[int, float]:
        """How many of the missing tokens are fetched, and how long that takes."""
        query = self._query
        if query.elsewhere is None:
            return 0, 0.0
        fetched = missing - self.missing(query.elsewhere.beside(load.worker_id))
        if fetched <= 0:
            return 0, 0.0
        compute_ms = fetched * load.pace.per_token_us / US_PER_MS
        usual = self._pairs.usual_ms_per_block
        if usual is None:
            fetch_ms = TRANSFER_SHARE * compute_ms
        else:
            run = -(-fetched // query.block_size)
            blocks = run + self._pairs.in_windows(run)
            pair, now = self._pairs.find(query.elsewhere.holder, load.worker_id), self._pairs.now
            fetch_ms = blocks * usual if pair is None else pair.transfer_ms(blocks, usual, now)
        fetch_ms += FETCH_MS
        return (fetched, fetch_ms) if fetch_ms < compute_ms else (0, 0.0)

    def _shortage(self, lacking: int, match: PrefixMatch) -> int:
        """The tokens without room on a worker that lacks so many blocks, if it held none."""
        return max(0, lacking - max(match.held, match.expected)) * self._block_size

    def _decode(self, load: WorkerLoad, match: PrefixMatch) -> _Decoding:
        pace, output, num_requests = load.pace, self._query.output_tokens, load.num_requests
        row_ms = (pace.per_token_us + pace.per_attended_us * self._num_tokens) / US_PER_MS
        tpot_ms, idle_ms = pace.step_ms + row_ms, pace.idle_ms
        lacking = self._room_blocks - load.blocks_total + load.blocks_claimed
        shortage, room_ms = self._shortage(lacking, match) if lacking > 0 else 0, 0.0
        if shortage:
            claimed = load.blocks_claimed * self._block_size
            freed_ms = output * tpot_ms * shortage / max(1, claimed)
            room_ms = max(freed_ms, shortage * pace.per_token_us / US_PER_MS)
        if num_requests >= load.max_batch > 0:
            ahead = num_requests - load.max_batch + 1
            room_ms += output * tpot_ms * ahead / load.max_batch
        delay_ms = DELAY_WEIGHT * num_requests * output * row_ms
        output_ms = output * (idle_ms + CROWD_SHARE * (tpot_ms - idle_ms))
        found = shortage, room_ms, output_ms, tpot_ms, delay_ms
        self._decoding[load.worker_id] = found
        return found


_Decoding = tuple[int, float, float, float, float]
"""The costs of decoding on a worker: tokens that do not fit, milliseconds until they fit,
milliseconds of the whole output and of one token now, and the milliseconds that other requests
lose to one more row in their steps."""


class _Needs(NamedTuple):
    """The part of a prompt that a worker lacks: tokens now, tokens when the prompt's turn comes,
    the pairs that these attend to, and whether blocks may come from a tier or another worker."""

    missing: int
    recompute: int
    attended: int
    may_fetch: bool


def exposed_blocks(num_tokens: int, block_size: int) -> int:
    """How many of the blocks that move are not hidden behind a later chunk."""
    return -(-min(num_tokens, LAST_CHUNK_TOKENS) // block_size)


def blocks_of(query: PlacementQuery) -> int:
    """The blocks of the prompt."""
    return -(-query.num_tokens // query.block_size)
