"""What a sequence holds of a group of layers that keep a state, counted in slots. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.layout import STATE_WINDOW
from scheduling.group_rule import GroupRule

KEPT = 2
"""One slot for the state at the last block boundary, one for the state after the last token."""


@dataclass(frozen=True)
class StateRule(GroupRule):
    """A slot is a block of the group, and a page. However long a sequence is, it holds the slots
    that it keeps and those that its next step writes: one, and in prompts one more for a state
    within the chunk."""

    window: int | None = STATE_WINDOW

    def held(self, num_blocks: int, step_tokens: int) -> int:
        """See GroupRule."""
        return KEPT + (1 if step_tokens == 1 else 2)
