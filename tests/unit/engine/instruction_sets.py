"""What kernels can be built for and tried on this machine."""

from __future__ import annotations

from engine.native.library import INSTRUCTION_SETS, best_instruction_set


def usable_instruction_sets() -> list[str]:
    """The best that this machine has, and what lies below it."""
    names = list(INSTRUCTION_SETS)
    return names[names.index(best_instruction_set()) :]


def instruction_sets_with_products() -> list[str]:
    """Those of them whose kernels have linear layers."""
    return [name for name in usable_instruction_sets() if "avx512_bf16" in INSTRUCTION_SETS[name]]
