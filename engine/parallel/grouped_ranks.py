"""The ranks of an engine whose sums and hidden states go through torch's process groups."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from engine.parallel.group_links import GroupLink
from engine.parallel.group_sums import GroupSums
from engine.parallel.process_groups import RankGroups
from engine.parallel.ranks import Ranks
from engine.parallel.step_watch import StepWatch
from engine.parallel.sums import NoSums


def grouped_ranks(
    groups: RankGroups,
    links: Sequence[socket.socket],
    on_loaded: Callable[[], None] = lambda: None,
    watch: StepWatch | None = None,
) -> Ranks:
    """The ranks, seen from the one of `groups`; see `Ranks`."""
    shard = groups.shard
    return Ranks(
        shard,
        links,
        NoSums() if shard.size == 1 else GroupSums(groups),
        None if shard.is_first_stage else GroupLink(groups, shard.stage - 1),
        None if shard.is_last_stage else GroupLink(groups, shard.stage + 1),
        groups=groups,
        watch=watch,
        on_loaded=on_loaded,
    )
