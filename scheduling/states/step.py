"""The slots of a sequence's states that one step reads and writes, in models whose layers keep
states. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateStep:
    """`read` is the slot of the state behind the tokens before the step's; None if there are none:
    the step begins with an empty state. `writes` are slots for the states behind the first so many
    of its tokens, ascending; the last one is behind all of them. No slot is both read and written,
    so a step that is computed again gives the same."""

    read: int | None
    writes: tuple[tuple[int, int], ...]
