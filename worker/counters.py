"""The counters of workers: every name that load reports carry, and its meaning.

Every worker reports every counter, starting at zero; counters only grow while the process lives.
"""

from __future__ import annotations

from enum import StrEnum


class Count(StrEnum):
    """A counter's name on the wire."""

    STEPS = "steps"
    """Steps that computed something."""
    FAILED_STEPS = "failed_steps"
    """Steps that raised; the worker then retries their sequences one by one."""
    FAILED_ROWS = "failed_rows"
    """Sequences that failed without their batch because the model gave them no finite logits."""
    PREFILL_TOKENS = "prefill_tokens"
    """Prompt tokens computed here, including those recomputed after preemption."""
    CACHED_TOKENS = "cached_tokens"
    """Prompt tokens that were neither computed nor moved, because their blocks were cached here."""
    DECODE_TOKENS = "decode_tokens"
    """Tokens that a decode worker sent to routers."""
    PREEMPTIONS = "preemptions"
    """Times that a sequence lost its blocks to a more senior one."""
    HANDOFFS = "handoffs"
    """Sequences that a decode worker took over from a prefill worker."""
    HANDOVERS = "handovers"
    """Sequences that left a decode worker for another one with their KV blocks."""
    BLOCKS_SENT = "blocks_sent"
    """KV blocks written into decode workers' pools."""
    BLOCKS_RECEIVED = "blocks_received"
    """KV blocks that arrived for this worker's handoffs, each counted once."""
    STALE_MESSAGES = "stale_messages"
    """Messages about attempts or handoffs that are over, superseded or unknown."""
    UNEXPECTED_MESSAGES = "unexpected_messages"
    """Well-formed messages of a type that their sender must not send here."""
    UNDELIVERABLE_MESSAGES = "undeliverable_messages"
    """Messages to peers that were gone."""
    FRAMES_REFUSED = "frames_refused"
    """Frames and notifications that are foreign, corrupt or from unknown senders."""
    PEERS_TURNED_AWAY = "peers_turned_away"
    """Connections refused before any frame: the peer could not prove the cluster's secret."""
    STREAMS_RESUMED = "streams_resumed"
    """Streams that a router resumed from another router or from its own earlier connection."""
    STREAMS_ABANDONED = "streams_abandoned"
    """Streams that ended because their router was lost and either no router resumed them in time
    or the same router reconnected without them."""
    LAPSES = "lapses"
    """Times that the lease ended while the process stood still, so that the worker registered as
    a new incarnation."""
    DESCRIPTORS_REFUSED = "descriptors_refused"
    """Descriptors of decode workers' pools refused: not authentic, or for another transport."""
