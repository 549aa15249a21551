"""The slots of a sequence's states that one step reads and writes, in models whose layers keep
states. Pure."""

from __future__ import annotations

import msgspec


class StateStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step that computes a sequence's tokens from position `start` on. `read` is the slot of the
    state before them; None if there is none: the step begins with an empty state. `writes` pairs
    numbers of the step's tokens, ascending, with the slots for the states behind these tokens; the
    last number is that of all its tokens. No slot is both read and written, so a step that is
    computed again gives the same."""

    start: int
    read: int | None
    writes: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """The position behind the step's last token."""
        return self.start + self.writes[-1][0]
