"""The policies that a simulation can use, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from protocol.errors import ConfigError
from router.routing.decision import decide
from simulator.policies import pools
from simulator.policies.ablation import without_pending, without_prediction, without_sessions
from simulator.policies.choices import Policy, by_rule, in_turn, never_split, with_threshold

BATON = "baton"
ALL, ABLATION = "all", "ablation"
RULES: Mapping[str, Callable[[], Policy]] = {
    BATON: lambda: decide,
    "random": lambda: by_rule(pools.at_random),
    "round-robin": in_turn,
    "least-loaded": lambda: by_rule(pools.least_loaded),
    "power-of-two": lambda: by_rule(pools.power_of_two),
    "prefix-affinity": lambda: by_rule(pools.prefix_affinity),
    "lmetric": lambda: by_rule(pools.lmetric),
    "llm-d": lambda: by_rule(pools.llm_d),
    "aibrix": lambda: by_rule(pools.aibrix),
    "sglang": lambda: by_rule(pools.sglang),
    "dynamo": lambda: by_rule(pools.dynamo),
    "threshold-2048": lambda: with_threshold(2048),
    "always-split": lambda: with_threshold(0),
    "never-split": lambda: never_split,
}
"""Baton's policy and those of others. Each entry makes a new policy, because some policies count
requests."""
PARTS: Mapping[str, Callable[[], Policy]] = {
    "no-prediction": lambda: without_prediction,
    "no-pending": lambda: without_pending,
    "no-local": RULES["always-split"],
    "no-sessions": lambda: without_sessions,
}
"""Baton's policy without one of its parts."""
POLICIES = {**RULES, **PARTS}


def policy_names(names: Sequence[str]) -> list[str]:
    """The named policies, each once; `all` stands for Baton's and those of others, `ablation` for
    Baton's with and without its parts. Raises ConfigError."""
    groups = {ALL: list(RULES), ABLATION: [BATON, *PARTS]}
    found: dict[str, None] = {}
    for name in names:
        if name not in groups and name not in POLICIES:
            known = ", ".join(POLICIES)
            raise ConfigError(f"--policies {name}: use one of {known}, or {ALL}, or {ABLATION}")
        found.update(dict.fromkeys(groups.get(name, [name])))
    return list(found)
