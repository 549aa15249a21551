"""Whether turns compute only what is new, and begin to answer as early as they should.

Pure: takes the accounts of a run, and returns the claims and whether they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bench.turns.accounts import Account
from bench.turns.contestants import Contestant

MOST_COMPUTED = 1.05
"""The most computed tokens for each new one. Tokens that rendering changed, and tokens that the
service chose to compute, do not count."""
LEAST_GAIN = 1.5
"""Fetching must shorten the TTFT by at least this factor, where placement is by load."""
NOISE = 1.05
"""Where placement is by affinity, the TTFT with fetching may be this many times that without."""


class Verdict(NamedTuple):
    """A sentence, and whether it holds."""

    text: str
    holds: bool


def verdicts(accounts: Mapping[str, Account], contestants: Iterable[Contestant]) -> list[Verdict]:
    """The claims about every contestant that fetches, compared with the same one without
    fetching."""
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
