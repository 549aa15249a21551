"""The counters of workers: every name that load reports carry, and its meaning.

Every worker reports every counter, starting at zero; counters only grow while the process lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from engine.expert_loads import ExpertLoads
from engine.rank_times import RankTime
from process.host_load import CpuTotals
from process.logs import LogCounts


class Count(StrEnum):
    """A counter's name on the wire; `MEANINGS` says what it counts."""

    STEPS = "steps"
    STEP_US = "step_us"
    UNDER_WAY_US = "under_way_us"
    BUBBLE_US = "bubble_us"
    PREDICTED_STEP_US = "predicted_step_us"
    STEP_ERROR_US = "step_error_us"
    DECODE_ROWS = "decode_rows"
    CHUNK_BUDGET_TOKENS = "chunk_budget_tokens"
    FAILED_STEPS = "failed_steps"
    FAILED_ROWS = "failed_rows"
    MASK_WAITS = "mask_waits"
    SLOW_GRAMMARS = "slow_grammars"
    PREFILL_TOKENS = "prefill_tokens"
    CACHED_TOKENS = "cached_tokens"
    FETCHED_TOKENS = "fetched_tokens"
    FETCHES = "fetches"
    FETCH_MISSING_BLOCKS = "fetch_missing_blocks"
    FETCHES_STOPPED = "fetches_stopped"
    FETCHES_LEFT = "fetches_left"
    SERVED_BLOCKS = "served_blocks"
    UNSERVED_BLOCKS = "unserved_blocks"
    TAKEN_BLOCKS = "taken_blocks"
    LOADED_TOKENS = "loaded_tokens"
    HOST_TIER_LOADED_BYTES = "host_tier_loaded_bytes"
    HOST_TIER_STORED_BYTES = "host_tier_stored_bytes"
    HOST_TIER_MISSED_BLOCKS = "host_tier_missed_blocks"
    HOST_TIER_EVICTED_BLOCKS = "host_tier_evicted_blocks"
    HOST_TIER_FAILURES = "host_tier_failures"
    DISK_TIER_LOADED_BYTES = "disk_tier_loaded_bytes"
    DISK_TIER_STORED_BYTES = "disk_tier_stored_bytes"
    DISK_TIER_EVICTED_BLOCKS = "disk_tier_evicted_blocks"
    DISK_TIER_FAILURES = "disk_tier_failures"
    DECODE_TOKENS = "decode_tokens"
    PREEMPTIONS = "preemptions"
    HANDOFFS = "handoffs"
    HANDOVERS = "handovers"
    BLOCKS_SENT = "blocks_sent"
    BLOCKS_RECEIVED = "blocks_received"
    STALE_MESSAGES = "stale_messages"
    UNEXPECTED_MESSAGES = "unexpected_messages"
    UNDELIVERABLE_MESSAGES = "undeliverable_messages"
    FRAMES_REFUSED = "frames_refused"
    PEERS_TURNED_AWAY = "peers_turned_away"
    STREAMS_RESUMED = "streams_resumed"
    STREAMS_ABANDONED = "streams_abandoned"
    LAPSES = "lapses"
    STALLS = "stalls"
    DESCRIPTORS_REFUSED = "descriptors_refused"
    EXPERT_PAIRS = "expert_pairs"
    BUSIEST_EXPERT_PAIRS = "busiest_expert_pairs"
    USED_EXPERTS = "used_experts"
    CPU_US = "cpu_us"
    CPU_WAIT_US = "cpu_wait_us"
    CPU_THROTTLED_US = "cpu_throttled_us"
    HOST_CPU_US = "host_cpu_us"
    HOST_PRESSURE_US = "host_pressure_us"
    LOG_LINES = "log_lines"
    LOG_LINES_LOST = "log_lines_lost"


MEANINGS: dict[Count, str] = {
    Count.STEPS: "Steps that computed something",
    Count.STEP_US: "Time in measured steps",
    Count.UNDER_WAY_US: "Time for which steps were under way",
    Count.BUBBLE_US: (
        "Time for which the stages of a model in several ranks computed no layers while steps were "
        "under way, all stages together"
    ),
    Count.PREDICTED_STEP_US: "Time that the step model had predicted for these steps",
    Count.STEP_ERROR_US: "Time by which these predictions were off, either way",
    Count.DECODE_ROWS: (
        "Sequences that decoded, added up over all steps: divided by `steps`, the mean batch"
    ),
    Count.CHUNK_BUDGET_TOKENS: (
        "Most prompt tokens that the steps with chunks could have computed (`chunk_max_tokens`)"
    ),
    Count.FAILED_STEPS: "Steps that raised; the worker then retries their sequences one by one",
    Count.FAILED_ROWS: (
        "Sequences that failed without their batch because the model gave them no finite logits"
    ),
    Count.MASK_WAITS: (
        "Times that a sequence was left out of steps because its grammar's mask was not ready"
    ),
    Count.SLOW_GRAMMARS: (
        "Sequences that ended because the masks of their request's grammar took too long"
    ),
    Count.PREFILL_TOKENS: (
        "Prompt tokens computed here, including those recomputed after preemption"
    ),
    Count.CACHED_TOKENS: (
        "Prompt tokens that were neither computed nor moved, because their blocks were cached here"
    ),
    Count.FETCHED_TOKENS: (
        "Prompt tokens that were not computed here, because another worker had their blocks cached"
    ),
    Count.FETCHES: "Requests to other workers for cached blocks",
    Count.FETCH_MISSING_BLOCKS: "Requested KV blocks that did not come",
    Count.FETCHES_STOPPED: "Fetches that took too long, so that the holder was asked to stop",
    Count.FETCHES_LEFT: (
        "Fetches that failed or whose holder fell silent; the request then waits again without it"
    ),
    Count.SERVED_BLOCKS: "KV blocks of this worker's cache that other workers asked for and got",
    Count.UNSERVED_BLOCKS: "KV blocks that other workers asked for and did not get from here",
    Count.TAKEN_BLOCKS: "KV blocks taken over from the caches of workers that drained",
    Count.LOADED_TOKENS: (
        "Prompt tokens that were not computed here, because a tier of this worker had their blocks"
    ),
    Count.HOST_TIER_LOADED_BYTES: "Bytes of KV blocks copied from host memory back into the pool",
    Count.HOST_TIER_STORED_BYTES: "Bytes of KV blocks copied from the pool to host memory",
    Count.HOST_TIER_MISSED_BLOCKS: (
        "KV blocks that were evicted from the pool before their copy to host memory was complete"
    ),
    Count.HOST_TIER_EVICTED_BLOCKS: (
        "KV blocks that left host memory, for lack of room or after `tier_max_age_s`"
    ),
    Count.HOST_TIER_FAILURES: (
        "KV blocks that could not be kept in host memory or had changed there"
    ),
    Count.DISK_TIER_LOADED_BYTES: "Bytes of KV blocks read from disk into host memory",
    Count.DISK_TIER_STORED_BYTES: "Bytes of KV blocks written to disk",
    Count.DISK_TIER_EVICTED_BLOCKS: (
        "KV blocks that left the disk, for lack of room or after `tier_max_age_s`"
    ),
    Count.DISK_TIER_FAILURES: (
        "KV blocks that could not be written to disk, or were not there as they had been written"
    ),
    Count.DECODE_TOKENS: "Tokens that a decode worker sent to routers",
    Count.PREEMPTIONS: "Times that a sequence lost its blocks to a more senior one",
    Count.HANDOFFS: "Sequences that a decode worker took over from a prefill worker",
    Count.HANDOVERS: "Sequences that left a decode worker for another one with their KV blocks",
    Count.BLOCKS_SENT: "KV blocks written into other workers' pools",
    Count.BLOCKS_RECEIVED: (
        "KV blocks that arrived for this worker's handoffs and fetches, each counted once"
    ),
    Count.STALE_MESSAGES: (
        "Messages about attempts or handoffs that are over, superseded or unknown"
    ),
    Count.UNEXPECTED_MESSAGES: (
        "Well-formed messages of a type that their sender must not send here"
    ),
    Count.UNDELIVERABLE_MESSAGES: "Messages to peers that were gone",
    Count.FRAMES_REFUSED: (
        "Frames and notifications that are foreign, corrupt or from unknown senders"
    ),
    Count.PEERS_TURNED_AWAY: (
        "Connections refused before any frame: the peer could not prove the cluster's secret"
    ),
    Count.STREAMS_RESUMED: (
        "Streams that a router resumed from another router or from its own earlier connection"
    ),
    Count.STREAMS_ABANDONED: (
        "Streams that ended because their router was lost and either no router resumed them "
        "in time or the same router reconnected without them"
    ),
    Count.LAPSES: (
        "Times that the lease ended while the process stood still, so that the worker "
        "registered as a new incarnation"
    ),
    Count.STALLS: "Times that requests waited and nothing happened for longer than `stall_alarm_s`",
    Count.DESCRIPTORS_REFUSED: (
        "Descriptors of other workers' pools refused: not authentic, or for another transport"
    ),
    Count.EXPERT_PAIRS: (
        "Pairs of a token with one of its experts, over all layers that are mixtures of experts"
    ),
    Count.BUSIEST_EXPERT_PAIRS: (
        "Of these the pairs of the busiest expert of each layer and step; times the number of "
        "experts, divided by `expert_pairs`, it is the imbalance, 1 where all have equally many"
    ),
    Count.USED_EXPERTS: (
        "Experts that had a token in a step, added up over layers and steps: their weights were "
        "read"
    ),
    Count.CPU_US: "CPU time of this process's threads",
    Count.CPU_WAIT_US: "Time that its threads could run and waited for a core",
    Count.CPU_THROTTLED_US: "Time that the CPU limit of its control group held it up",
    Count.HOST_CPU_US: "CPU time of all processes of the machine",
    Count.HOST_PRESSURE_US: "Time that some process of the machine waited for a core",
    Count.LOG_LINES: "Lines of its log that were written",
    Count.LOG_LINES_LOST: "Lines of its log that could not be written",
}
"""What each counter counts."""


class Counters:
    """The counters of one worker, which load reports carry."""

    def __init__(self) -> None:
        self.values: Counter[Count] = Counter(dict.fromkeys(Count, 0))
        self._totals: Counter[str] = Counter()

    def set_cpu(self, cpu: CpuTotals) -> None:
        """Take the totals of this process and its machine."""
        self.values[Count.CPU_US] = cpu.ran_us
        self.values[Count.CPU_WAIT_US] = cpu.waited_us
        self.values[Count.CPU_THROTTLED_US] = cpu.throttled_us
        self.values[Count.HOST_CPU_US] = cpu.busy_us
        self.values[Count.HOST_PRESSURE_US] = cpu.pressed_us

    def set_expert_loads(self, loads: ExpertLoads) -> None:
        """Take the totals of the model's mixtures."""
        self.values[Count.EXPERT_PAIRS] = loads.pairs
        self.values[Count.BUSIEST_EXPERT_PAIRS] = loads.busiest_pairs
        self.values[Count.USED_EXPERTS] = loads.used_experts

    def set_rank_times(self, times: Sequence[RankTime], tp_size: int, under_way_s: float) -> None:
        """Take the totals of a model's ranks, of which each stage has `tp_size`."""
        under_way_us = round(under_way_s * 1e6)
        busy_us = sum(each.busy_us for each in times)
        self.values[Count.UNDER_WAY_US] = under_way_us
        self.values[Count.BUBBLE_US] = max(0, len(times) * under_way_us - busy_us) // tp_size

    def set_log(self, lines: LogCounts) -> None:
        """Take the counts of this process's log."""
        self.values[Count.LOG_LINES] = lines.written
        self.values[Count.LOG_LINES_LOST] = lines.lost

    def __getitem__(self, name: Count) -> int:
        return self.values[name]

    def add(self, name: Count, number: int = 1) -> None:
        """Add to a counter."""
        self.values[name] += number

    def add_up_to(self, name: Count, source: str, total: int) -> None:
        """Add the growth of `total`, kept by `source`, since the last call."""
        self.add(name, total - self._totals[source])
        self._totals[source] = total
