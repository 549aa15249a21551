"""The prefill side of handoffs between pools that are sharded over tensor-parallel ranks.

Only tests use this module. It is kept until workers of several cards replace it with the one
handoff. One rank of a prefill worker writes to every rank of the decode worker that shares heads
with it. Each of these lanes is a handoff of its own in `kv_transfer.handoff.source`, with its own
ask, grant, writes and answer. This module feeds one prompt to all lanes and keeps its blocks pinned
until the last lane releases them. Pure, as the source is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.handoff.actions import Close, Lookup, PostWrite, Release, SendBegun, SourceAction
from kv_transfer.handoff.key import HandoffKey
from kv_transfer.handoff.source import HandoffSource
from protocol.messages import KvAsk, KvGrant, KvRenew


@dataclass(frozen=True)
class ForLane:
    """An action towards target rank `target`; pass that rank when reporting a write's end."""

    target: int
    action: PostWrite | SendBegun | Close


ShardedSenderAction = ForLane | Release


class ShardedSender:
    """All handoffs of one rank of a prefill worker, to the target ranks passed to `open`."""

    def __init__(self, make_source: Callable[[], HandoffSource]) -> None:
        """`make_source` makes the state machine of one lane; each target rank has its own."""
        self._make_source = make_source
        self._lanes: dict[int, HandoffSource] = {}  # by target rank
        self._pinned_for: dict[HandoffKey, set[int]] = {}  # target ranks

    @property
    def ignored(self) -> int:
        """Number of events that belong to no handoff."""
        return sum(lane.ignored for lane in self._lanes.values())

    @property
    def num_open(self) -> int:
        """Handoffs of all lanes that have not closed."""
        return sum(lane.num_open for lane in self._lanes.values())

    @property
    def num_outstanding(self) -> int:
        """Writes that were posted and are not finished."""
        return sum(lane.num_outstanding for lane in self._lanes.values())

    # -- calls by the prefill worker itself ----------------------------------------------

    def open(
        self,
        key: HandoffKey,
        targets: Sequence[int],
        num_blocks: int,
        now: float,
        grant_deadline: float,
    ) -> list[ShardedSenderAction]:
        """A prompt of `num_blocks` blocks begins for `targets`, the target ranks that share heads
        with us; each has until `grant_deadline` to grant. The blocks stay pinned until Release."""
        if not targets:
            raise ValueError(f"no target rank shares heads with us: {key}")
        self._pinned_for[key] = set(targets)
        return self._with(targets, lambda lane: lane.open(key, num_blocks, now, grant_deadline))

    def begin(self, key: HandoffKey, now: float) -> list[ShardedSenderAction]:
        """The owner holds blocks for the whole prompt; see `HandoffSource.begin`."""
        return self._with(self._targets(key), lambda lane: lane.begin(key, now))

    def blocks_ready(
        self, key: HandoffKey, first_block: int, block_ids: Sequence[int], chunk: int, now: float
    ) -> list[ShardedSenderAction]:
        """Prompt blocks from `first_block` on are computed; see `HandoffSource.blocks_ready`."""
        return self._with(
            self._targets(key),
            lambda lane: lane.blocks_ready(key, first_block, block_ids, chunk, now),
        )

    def finish(self, key: HandoffKey, now: float) -> list[ShardedSenderAction]:
        """The last block is ready."""
        return self._with(self._targets(key), lambda lane: lane.finish(key, now))

    def write_finished(
        self, target: int, write_id: int, error: str | None
    ) -> list[ShardedSenderAction]:
        """The transport reports the end of a lane's PostWrite."""
        return self._with([target], lambda lane: lane.write_finished(write_id, error))

    def abort(self, key: HandoffKey, error: str) -> list[ShardedSenderAction]:
        """Stop all lanes for a reason of this worker's own."""
        return self._with(list(self._lanes), lambda lane: lane.abort(key, error))

    def sweep(self, now: float) -> list[ShardedSenderAction]:
        """`HandoffSource.sweep` for every lane."""
        return self._with(list(self._lanes), lambda lane: lane.sweep(now))

    # -- messages of decode workers' ranks -----------------------------------------------

    def ask(self, target: int, ask: KvAsk, now: float) -> list[ShardedSenderAction]:
        """Target rank `target` waits for the prompt; it may ask before `open`."""
        return self._with([target], lambda lane: lane.ask(ask, now))

    def grant(self, target: int, grant: KvGrant, now: float) -> list[ShardedSenderAction]:
        """The right to write to blocks of target rank `target`, once its lane has begun."""
        return self._with([target], lambda lane: lane.grant(grant, now))

    def renew(
        self, target: int, renew: KvRenew, agent: str, now: float
    ) -> list[ShardedSenderAction]:
        """Target rank `target` extends its grant."""
        return self._with([target], lambda lane: lane.renew(renew, agent, now))

    def give_up(self, target: int, key: HandoffKey, agent: str) -> list[ShardedSenderAction]:
        """Target rank `target` no longer wants the blocks; it gets an answer."""
        return self._with([target], lambda lane: lane.abort(key, agent=agent))

    def peer_lost(self, agent: str) -> list[ShardedSenderAction]:
        """The target rank is gone, or its pool can no longer be reached."""
        return self._with(list(self._lanes), lambda lane: lane.peer_lost(agent))

    # -- steps ---------------------------------------------------------------------------

    def _targets(self, key: HandoffKey) -> list[int]:
        return sorted(self._pinned_for.get(key, ()))

    def _with(
        self, targets: Sequence[int], move: Callable[[HandoffSource], list[SourceAction]]
    ) -> list[ShardedSenderAction]:
        joined: list[ShardedSenderAction] = []
        for target in targets:
            if target not in self._lanes:
                self._lanes[target] = self._make_source()
            lane = self._lanes[target]
            for action in move(lane):
                assert not isinstance(action, Lookup), "sharded pools serve no fetches"
                if isinstance(action, Release):
                    joined += self._release(action, target)
                else:
                    joined.append(ForLane(target, action))
        return joined

    def _release(self, release: Release, target: int) -> list[ShardedSenderAction]:
        targets = self._pinned_for[release.key]
        targets.discard(target)
        if targets:
            return []
        del self._pinned_for[release.key]
        return [release]
