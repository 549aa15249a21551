"""The messages that grant a sink's blocks and extend the grant. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.handoff.key import HandoffKey
from protocol.handoff_messages import GroupBlocks, KvFetch, KvGrant, KvRenew


@dataclass(frozen=True)
class WantedBlocks:
    """Blocks to fetch into: blocks of the first group, for the prompt blocks from `first_block` on,
    and the hashes of the contents that they are to hold. The slots of `others` are as in
    `KvFetch`."""

    first_block: int
    blocks: Sequence[tuple[bytes, int]]
    others: Sequence[GroupBlocks] = ()


class Grants:
    """Makes the grants of one sink. They name the sink `agent` and are valid for `ttl_ms`."""

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

    def of_fetch(self, key: HandoffKey, wanted: WantedBlocks) -> KvFetch:
        """A fetch's grant."""
        return KvFetch(
            request_id=key.request_id,
            attempt=key.attempt,
            part=key.part,
            agent=self._agent,
            first_block=wanted.first_block,
            hashes=[digest for digest, _ in wanted.blocks],
            block_ids=[block for _, block in wanted.blocks],
            others=list(wanted.others),
            ttl_ms=self._ttl_ms,
        )

    def renewal(self, key: HandoffKey) -> KvRenew:
        """The extension of a handoff's or fetch's grant."""
        request_id, attempt, part = key
        return KvRenew(request_id=request_id, attempt=attempt, part=part, ttl_ms=self._ttl_ms)
