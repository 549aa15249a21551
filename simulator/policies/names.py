"""The policies that a simulation can use, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from protocol.errors import ConfigError
from router.routing.decision import decide
from simulator.policies import pools
from simulator.policies.choices import Policy, by_rule, in_turn, never_split, with_threshold

BATON = "baton"
ALL = "all"
POLICIES: Mapping[str, Callable[[], Policy]] = {
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
"""Each makes a fresh policy, because some count."""


def policy_names(names: Sequence[str]) -> list[str]:
    """The named policies, each once; `all` stands for every one. Raises ConfigError."""
    found: dict[str, None] = {}
    for name in names:
        if name != ALL and name not in POLICIES:
            raise ConfigError(f"--policies {name}: there are {', '.join(POLICIES)}, or {ALL}")
        found.update(dict.fromkeys(POLICIES if name == ALL else [name]))
    return list(found)
