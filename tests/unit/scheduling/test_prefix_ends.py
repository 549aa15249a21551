"""The ends of usable prefixes equal the definition, however blocks come and go."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.prefix_ends import PrefixEnds
from tests.effort import times

NODES = 12
PARENTS = [None, 0, 1, 2, 3, 2, 5, 6, 0, 8, 9, None]
"""A tree of prompts that share beginnings; a block's parent has a lower number."""


def name(node: int) -> bytes:
    return bytes([node])


def is_whole(node: int | None, cached: set[int], cover: int) -> bool:
    """Whether the `cover` blocks up to this one are cached, or all if there are fewer."""
    while node is not None and cover:
        if node not in cached:
            return False
        node, cover = PARENTS[node], cover - 1
    return True


@settings(max_examples=times(100, 1000), deadline=None)
@given(
    covers=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    changes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, NODES - 1)), max_size=60),
    drains=st.sets(st.integers(0, 60)),
)
def test_ends_are_where_every_window_is_whole(
    covers: list[int], changes: list[tuple[int, int]], drains: set[int]
) -> None:
    ends = PrefixEnds(covers)
    cached: list[set[int]] = [set() for _ in covers]
    known: set[bytes] = set()
    for step, (group, node) in enumerate([*changes, (0, 0), (0, 0)]):
        group %= len(covers)
        parent = PARENTS[node]
        if node in cached[group]:
            cached[group].discard(node)
            ends.change(group, [], [name(node)])
        else:
            cached[group].add(node)
            ends.change(group, [(name(node), None if parent is None else name(parent))], [])
        expected = {
            name(node)
            for node in range(NODES)
            if all(is_whole(node, each, cover) for each, cover in zip(cached, covers, strict=True))
        }
        assert set(ends.all()) == expected
        if step in drains:
            new, gone = ends.drain()
            assert not known & {*new}
            assert known >= {*gone}
            known = (known | {*new}) - {*gone}
            assert known == expected
