"""What kernels can be built for and tried on this machine."""

from __future__ import annotations

from engine.native.library import INSTRUCTION_SETS, best_instruction_set


def usable_instruction_sets() -> list[str]:
    """The best that this machine has, and what lies below it."""
    names = list(INSTRUCTION_SETS)
    return names[names.index(best_instruction_set()) :]
