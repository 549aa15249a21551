"""The writes of all handoffs that were posted and have not finished."""

from __future__ import annotations

from kv_transfer.handoff.actions import PostWrite
from kv_transfer.handoff.key import HandoffKey
from kv_transfer.handoff.outgoing import Outgoing, Piece


class PostedWrites:
    """Numbers the writes. `len` is the number of those that have not finished."""

    def __init__(self) -> None:
        self._keys: dict[int, HandoffKey] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._keys)

    def post(
        self, key: HandoffKey, handoff: Outgoing, piece: Piece, post_before: float
    ) -> PostWrite:
        """Write a piece of this handoff."""
        assert handoff.agent is not None, "it was granted"
        write_id = self._next_id
        self._next_id += 1
        self._keys[write_id] = key
        handoff.outstanding.add(write_id)
        return PostWrite(
            write_id=write_id,
            key=key,
            agent=handoff.agent,
            source_blocks=piece.source_blocks,
            target_blocks=piece.target_blocks,
            first_block=piece.first_block,
            chunk=piece.chunk,
            post_before=post_before,
            group=piece.group,
        )

    def pop(self, write_id: int) -> HandoffKey | None:
        """Note that the write has finished. Returns its handoff; None if the write is not known."""
        return self._keys.pop(write_id, None)
