"""Where cached prefixes can end if layers keep windows: at block boundaries before which each
window is whole.

A prefix is usable up to a block boundary at which every windowed group still has the blocks that
the tokens behind the boundary see. This module keeps the set of these boundaries up to date as
blocks come and go; workers report the boundaries to routers. Pure; a change takes at most as many
steps as a window has blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence


class _Runs:
    """The cached blocks of one windowed group, by hash: how many of them follow each other up to
    each block, up to `cover`, the most that a window reaches back. `note` is called with each block
    at which the window becomes whole (True) or no longer is."""

    def __init__(self, cover: int, note: Callable[[bytes, bool], None]) -> None:
        self._cover = cover
        self._note = note
        self._length: dict[bytes, int] = {}
        self._parent: dict[bytes, bytes | None] = {}
        self._children: dict[bytes, set[bytes]] = {}

    def store(self, digest: bytes, parent: bytes | None) -> None:
        """Note that a block is cached. Its parent is None if it is a prompt's first."""
        self._parent[digest] = parent
        if parent is not None:
            self._children.setdefault(parent, set()).add(digest)
        self._update([digest])

    def remove(self, digest: bytes) -> None:
        """Note that a block is no longer cached."""
        parent = self._parent.pop(digest)
        if parent is not None:
            siblings = self._children[parent]
            siblings.discard(digest)
            if not siblings:
                del self._children[parent]
        if self._length.pop(digest) == self._cover:
            self._note(digest, False)
        self._update(list(self._children.get(digest, ())))

    def _update(self, changed: list[bytes]) -> None:
        """Bring the runs of these blocks, and of those behind them, up to date."""
        while changed:
            digest = changed.pop()
            parent = self._parent[digest]
            before, length = self._length.get(digest), self._cover
            if parent is not None:
                length = min(self._cover, self._length.get(parent, 0) + 1)
            if length == before:
                continue
            self._length[digest] = length
            if length == self._cover:
                self._note(digest, True)
            elif before == self._cover:
                self._note(digest, False)
            changed += self._children.get(digest, ())


class PrefixEnds:
    """The last blocks, by hash, of the prefixes at which all windowed groups can continue."""

    def __init__(self, covers: Sequence[int]) -> None:
        """`covers` has the number of blocks that the window of each group reaches back, at least
        1."""
        self._whole: Counter[bytes] = Counter()  # groups whose window is whole there
        self._groups = [_Runs(cover, self._note) for cover in covers]
        self._changed: dict[bytes, bool] = {}  # whether it was an end at the last `drain`

    def change(
        self,
        group: int,
        stored: Iterable[tuple[bytes, bytes | None]],
        removed: Iterable[bytes],
    ) -> None:
        """Blocks of a group that are cached now, each with its parent, and that no longer are."""
        runs = self._groups[group]
        for digest in removed:
            runs.remove(digest)
        for digest, parent in stored:
            runs.store(digest, parent)

    def drain(self) -> tuple[list[bytes], list[bytes]]:
        """The ends that are new, and those that are gone, since the last call."""
        changed, self._changed = self._changed, {}
        new = [each for each, was in changed.items() if not was and self._is_end(each)]
        gone = [each for each, was in changed.items() if was and not self._is_end(each)]
        return new, gone

    def all(self) -> list[bytes]:
        """The ends as of now."""
        return [digest for digest in self._whole if self._is_end(digest)]

    def _is_end(self, digest: bytes) -> bool:
        return self._whole[digest] == len(self._groups)

    def _note(self, digest: bytes, is_whole: bool) -> None:
        self._changed.setdefault(digest, self._is_end(digest))
        self._whole[digest] += 1 if is_whole else -1
        if not self._whole[digest]:
            del self._whole[digest]
