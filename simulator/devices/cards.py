"""The cards that a simulated worker may run on, by their makers' data sheets.

The efficiencies are the shares of the peaks that good kernels reach. A file that `--gpu` names
replaces any number with a measured one, or the whole roofline with measured steps.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from checkpoint.json_keys import JsonKeys, read_json_object
from protocol.errors import ConfigError
from simulator.devices.measured_steps import read_steps
from simulator.devices.step_times import StepTimes


@dataclass(frozen=True)
class Card:
    """One card.

    - `flops`: dense bf16 operations per second. A product of n rows reaches the share
      `matrix_share * n / (n + half_rows)` of them, attention reaches `attention_share`.
    - `memory_bytes`, `memory_bytes_per_s`: its memory; steps reach `memory_share` of the bandwidth.
    - `peer_bytes_per_s`: the rate to the other cards of its host, in one direction; every exchange
      among them takes at least `peer_latency_s`.
    - `network_bytes_per_s`: the rate to other hosts, in one direction.
    - `step_s`: the fixed time of a step, and `layer_s`: the fixed time that each layer adds:
      launches of kernels and the host's work.
    """

    name: str
    flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    peer_bytes_per_s: float
    network_bytes_per_s: float
    matrix_share: float = 0.75
    half_rows: float = 64.0
    attention_share: float = 0.5
    memory_share: float = 0.85
    peer_latency_s: float = 8e-6
    step_s: float = 4e-4
    layer_s: float = 6e-6


_T, _G = 1e12, 1e9
_MOST = 1e18
CARDS = {
    card.name: card
    for card in (
        Card("H100", 989 * _T, 80 * _G, 3.35 * _T, 450 * _G, 50 * _G),
        Card("H200", 989 * _T, 141 * _G, 4.8 * _T, 450 * _G, 50 * _G),
        Card("A100-80G", 312 * _T, 80 * _G, 2.039 * _T, 300 * _G, 25 * _G),
        Card("A800", 312 * _T, 80 * _G, 2.039 * _T, 200 * _G, 25 * _G),
        Card("L40S", 362 * _T, 48 * _G, 0.864 * _T, 32 * _G, 12.5 * _G, peer_latency_s=2e-5),
    )
}


def card_named(name: str) -> Card:
    """The card with this name, in any case. Raises ConfigError."""
    for card in CARDS.values():
        if card.name.lower() == name.lower():
            return card
    raise ConfigError(
        f"--gpu {name}: use one of {', '.join(CARDS)}, or a file with measured numbers"
    )


def read_card(path: Path) -> tuple[Card, StepTimes | None]:
    """The card in a JSON file: the key `like` names a card of the list, the others are those of
    `Card` and replace its numbers; `steps`, if it is there, has measured steps. Raises
    ModelLoadError and ConfigError."""
    keys = JsonKeys(read_json_object(path), str(path))
    card = card_named(keys.text("like"))
    known = {each.name for each in fields(Card)}
    unknown = sorted(keys.values.keys() - known - {"like", "steps"})
    if unknown:
        raise ConfigError(
            f"{path}: {unknown[0]!r} is not a property of a card; use one of "
            f"{', '.join(sorted(known))}"
        )
    changes = {
        name: keys.text(name) if name == "name" else keys.number(name, maximum=_MOST)
        for name in known
        if name in keys
    }
    steps = keys.table("steps")
    measured = None if steps is None else read_steps(steps)
    return replace(card, **{"name": path.stem, **changes}), measured
