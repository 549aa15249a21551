"""A grammar that allows every token, when the test says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class HeldGrammar:
    """Implements `scheduling.sequence.OutputGrammar`. If it `is_slow`, every token makes it await a
    mask until `give_mask`."""

    is_ready: bool = True
    is_slow: bool = False
    awaits_mask: bool = False
    is_closed: bool = False

    def advance(self, token_id: int) -> bool:
        assert not self.awaits_mask, "a token was chosen without a mask"
        self.awaits_mask = self.is_slow
        return False

    def give_mask(self) -> None:
        """The next token's mask is there."""
        self.awaits_mask = False

    def close(self) -> None:
        self.is_closed = True
