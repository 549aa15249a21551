"""Which unpinned blocks are evicted last, because a client has announced another request.

Pure; its owner sets the time. A hint protects blocks of one owner for a while: as long as there are
unprotected blocks, these are evicted first. It is a weight, not a pin: if only protected blocks are
left, those of the lowest priority are evicted. An owner may protect a part of the pool, and all
owners together a larger part; blocks beyond that are not protected.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from protocol.retention import RetentionHint

OWNER_SHARE, ALL_SHARE = 1 / 4, 1 / 2
"""The parts of the pool that one owner, and all together, may protect."""
PARTS = 64
"""If only protected blocks are free, 1 / PARTS of them lose their protection at once."""


@dataclass(frozen=True)
class _Protection:
    owner: str
    priority: int
    until: float


class Retention:
    """The protected blocks of one pool. `now` is the time of the latest step, in seconds of any
    monotonic clock."""

    def __init__(self, num_blocks: int) -> None:
        self.now = 0.0
        self._most_of_owner = int(OWNER_SHARE * num_blocks)
        self._most = int(ALL_SHARE * num_blocks)
        self._protected: dict[int, _Protection] = {}
        self._of_owner: Counter[str] = Counter()

    def __len__(self) -> int:
        """The number of blocks whose protection has not been seen to end."""
        return len(self._protected)

    def protect(self, blocks: Sequence[int], owner: str, hint: RetentionHint) -> int:
        """Protect blocks, given in chain order, as far as the limits allow: the first ones, without
        which the later ones are of no use. Returns their number. A hint replaces an earlier one,
        but not a longer one of another owner."""
        self._expire()
        protection = _Protection(owner, hint.priority, self.now + hint.seconds)
        for number, block in enumerate(blocks):
            former = self._protected.get(block)
            if former is None or former.owner != owner:
                if former is not None and former.until > protection.until:
                    continue
                is_full = former is None and len(self._protected) >= self._most
                if is_full or self._of_owner.get(owner, 0) >= self._most_of_owner:
                    return number
            self.forget(block)
            self._protected[block] = protection
            self._of_owner[owner] += 1
        return len(blocks)

    def forget(self, block: int) -> None:
        """End the protection of a block: its contents have changed, or it may be evicted like any
        other."""
        protection = self._protected.pop(block, None)
        if protection is not None:
            self._of_owner[protection.owner] -= 1
            if not self._of_owner[protection.owner]:
                del self._of_owner[protection.owner]

    def take(self, free: OrderedDict[int, None], count: int) -> list[int]:
        """Take the first `count` unprotected blocks out of `free`, to evict them. Protected blocks
        on the way move to the end, so that each is passed over once a round."""
        if not self._protected:
            return [free.popitem(last=False)[0] for _ in range(count)]
        taken: list[int] = []
        for _ in range(len(free)):
            if len(taken) == count:
                return taken
            block = next(iter(free))
            if self._is_protected(block):
                free.move_to_end(block)
            else:
                del free[block]
                taken.append(block)
        if len(taken) < count:
            self._give_up_weakest(free, count - len(taken))
        return taken + [free.popitem(last=False)[0] for _ in range(count - len(taken))]

    def next(self, free: OrderedDict[int, None], count: int) -> list[int]:
        """At most `count` of the free blocks that `take` takes next, in this order. Examines twice
        as many; protected ones among them move to the end, as in `take`."""
        if not self._protected:
            return list(islice(free, count))
        first = list(islice(free, 2 * count))
        unprotected = [each for each in first if not self._is_protected(each)]
        if len(unprotected) >= count:
            return unprotected[:count]
        if len(first) == len(free):
            protected = [each for each in first if each in self._protected]
            order = sorted(protected, key=lambda block: self._protected[block].priority)
            return (unprotected + order)[:count]
        for block in first:
            if block in self._protected:
                free.move_to_end(block)
        return unprotected

    def _give_up_weakest(self, free: OrderedDict[int, None], lacking: int) -> None:
        """If all free blocks are protected, unprotect those of the lowest priority and put them
        first in `free`: at least `lacking`, and more at a time, so that few searches are needed."""
        order = sorted(free, key=lambda block: self._protected[block].priority)
        for block in reversed(order[: max(lacking, len(order) // PARTS)]):
            self.forget(block)
            free.move_to_end(block, last=False)

    def _is_protected(self, block: int) -> bool:
        protection = self._protected.get(block)
        if protection is None:
            return False
        if self.now >= protection.until:
            self.forget(block)
            return False
        return True

    def _expire(self) -> None:
        for block, protection in list(self._protected.items()):
            if self.now >= protection.until:
                self.forget(block)
