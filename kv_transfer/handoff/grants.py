"""The messages that grant a sink's blocks and extend the grant. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.handoff.key import HandoffKey
from protocol.handoff_messages import GroupBlocks, KvFetch, KvGrant, KvRenew


class Grants:
    """Grants of one sink, whose name in them is `agent`, with `ttl_ms` to live."""

    def __init__(self, agent: str, ttl_ms: int) -> None:
        self._agent = agent
        self._ttl_ms = ttl_ms

    def of_handoff(
        self,
        key: HandoffKey,
        first_block: int,
        block_ids: Sequence[int],
        others: Sequence[GroupBlocks],
    ) -> KvGrant:
        """A handoff's grant: blocks of the first group and of the others."""
        return KvGrant(
            request_id=key.request_id,
            attempt=key.attempt,
            agent=self._agent,
            first_block=first_block,
            block_ids=list(block_ids),
            others=list(others),
            ttl_ms=self._ttl_ms,
        )

    def of_fetch(
        self, key: HandoffKey, first_block: int, blocks: Sequence[tuple[bytes, int]]
    ) -> KvFetch:
        """A fetch's grant: each block with the hash of what it is to hold."""
        return KvFetch(
            request_id=key.request_id,
            attempt=key.attempt,
            part=key.part,
            agent=self._agent,
            first_block=first_block,
            hashes=[digest for digest, _ in blocks],
            block_ids=[block for _, block in blocks],
            ttl_ms=self._ttl_ms,
        )

    def renewal(self, key: HandoffKey) -> KvRenew:
        """The extension of either."""
        request_id, attempt, part = key
        return KvRenew(request_id=request_id, attempt=attempt, part=part, ttl_ms=self._ttl_ms)
