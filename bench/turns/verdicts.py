"""Whether turns compute only what is new, and begin to answer as early as they should.

Pure: from the accounts of a run, what was to be shown and whether it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bench.turns.accounts import Account
from bench.turns.contestants import Contestant

MOST_COMPUTED = 1.05
"""Computed tokens for each new one, without those of rendering and those that were chosen."""
LEAST_GAIN = 1.5
"""How much earlier the first token comes with fetching, where placement is by load."""
NOISE = 1.05
"""What counts as no later, where placement is by affinity."""


class Verdict(NamedTuple):
    """A sentence, and whether it holds."""

    text: str
    holds: bool


def verdicts(accounts: Mapping[str, Account], contestants: Iterable[Contestant]) -> list[Verdict]:
    """Those on every contestant that fetches and took part, with the one without fetching."""
    found = []
    vllm = accounts.get("vLLM")
    for each in contestants:
        own, plain = accounts.get(each.name), accounts.get(each.without)
        if own is None or not each.without:
            continue
        parts = own.computed
        share = (parts.new + parts.block) / max(1, own.num_new)
        text = f"{share:.2f} computed tokens for each new one, at most {MOST_COMPUTED}"
        found.append(Verdict(f"{each.name}: {text}", share <= MOST_COMPUTED))
        if plain is not None:
            most = 1 / LEAST_GAIN if each.name.startswith("by load") else NOISE
            ratio = own.ratio_to(plain)
            text = f"{ratio:.2f} of the TTFT without fetching, at most {most:.2f}"
            found.append(Verdict(f"{each.name}: {text}", ratio <= most))
        if vllm is not None:
            ratio = own.ratio_to(vllm)
            text = f"{ratio:.2f} of vLLM's TTFT, less than 1"
            found.append(Verdict(f"{each.name}: {text}", ratio < 1))
    return found
