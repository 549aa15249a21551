"""What workers count: the whole set of names that load reports carry, and what each means.

Every worker reports every counter, from zero on; they only grow while its process lives.
"""

from __future__ import annotations

from enum import StrEnum


class Count(StrEnum):
    """A counter's name on the wire."""

    STEPS = "steps"
    """Steps that computed something."""
    FAILED_STEPS = "failed_steps"
    """Steps that raised; their sequences are then tried one by one."""
    FAILED_ROWS = "failed_rows"
    """Sequences that ended alone because the model gave them no finite logits."""
    PREFILL_TOKENS = "prefill_tokens"
    """Prompt tokens computed here, recomputed ones of preempted sequences included."""
    CACHED_TOKENS = "cached_tokens"
    """Prompt tokens that need not be computed or moved, because their blocks were cached here."""
    DECODE_TOKENS = "decode_tokens"
    """Tokens handed to routers by a decode worker."""
    PREEMPTIONS = "preemptions"
    """Sequences that lost their blocks to more senior ones, each time that they did."""
    HANDOFFS = "handoffs"
    """Sequences that a decode worker took over from a prefill worker."""
    HANDOVERS = "handovers"
    """Sequences that left a decode worker for another one with their KV blocks."""
    BLOCKS_SENT = "blocks_sent"
    """KV blocks written into decode workers' pools."""
    BLOCKS_RECEIVED = "blocks_received"
    """KV blocks that arrived for handoffs of ours, each once."""
    STALE_MESSAGES = "stale_messages"
    """Messages about attempts and handoffs that are over, superseded or unknown."""
    UNEXPECTED_MESSAGES = "unexpected_messages"
    """Well-formed messages that their sender has no business to send here."""
    UNDELIVERABLE_MESSAGES = "undeliverable_messages"
    """Messages to peers that were gone."""
    FRAMES_REFUSED = "frames_refused"
    """Frames and notifications that are foreign, corrupt or from strangers."""
    PEERS_TURNED_AWAY = "peers_turned_away"
    """Connections refused before a frame was taken: they could not prove the cluster's secret."""
    STREAMS_RESUMED = "streams_resumed"
    """Streams that a router took up from another one, or from a former connection of its own."""
    STREAMS_ABANDONED = "streams_abandoned"
    """Streams that ended because their router was lost, and no other came for them in time, or it
    came back without them."""
    LAPSES = "lapses"
    """Times that the lease ended while the process stood still, and it came back as another."""
    DESCRIPTORS_REFUSED = "descriptors_refused"
    """Decode workers' pools refused: not authentic, or of another transport."""
