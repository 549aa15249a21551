"""Traffic that is made up: requests at random times, in bursts, or as conversations.

`poisson:rate=5,prompt=1000,output=200,requests=1000` and so on: a kind and its numbers. Lengths are
drawn from a distribution with the given mean; `spread` is the standard deviation divided by the
mean.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from math import log, sqrt

from protocol.errors import ConfigError
from simulator.traces.lines import MAX_TOKENS
from simulator.traces.sessions import BlockRuns, Session, Turn

BLOCK_TOKENS = 64
_SHARED_SPACE = 1
_COMMON = {"rate": 4.0, "requests": 1000.0, "prompt": 1024.0, "output": 256.0, "spread": 0.5}
KINDS: Mapping[str, Mapping[str, float]] = {
    "poisson": {**_COMMON, "shared": 0.0},
    "bursts": {**_COMMON, "burst": 16.0, "shared": 0.0},
    "turns": {**_COMMON, "turns": 5.0, "pause": 10.0, "shared": 512.0},
}
"""The kinds of traffic, each with its numbers and their defaults."""

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "rate": (1e-6, 1e6), "requests": (1, 1e7), "prompt": (1, 1e7), "output": (1, 1e6),
    "spread": (0, 10), "shared": (0, 1e7), "burst": (1, 1e6), "turns": (1, 1e4), "pause": (0, 1e6),
}  # fmt: skip


def is_generated(text: str) -> bool:
    """Whether the name of a trace stands for made-up traffic."""
    return text.partition(":")[0] in KINDS


def sessions(text: str, rng: random.Random, block_tokens: int = BLOCK_TOKENS) -> Iterator[Session]:
    """The traffic that a text describes; prompts repeat by blocks of `block_tokens` tokens. Raises
    ConfigError."""
    kind, _, rest = text.partition(":")
    numbers = dict(KINDS[kind])
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in numbers:
            raise ConfigError(f"--trace {text}: {kind} has {', '.join(numbers)}; {name!r} is none")
        numbers[name] = _number(text, name, value)
    if kind == "turns":
        return _conversations(numbers, rng, block_tokens)
    return _requests(numbers, rng, block_tokens)


def _number(text: str, name: str, value: str) -> float:
    low, high = _BOUNDS[name]
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not low <= number <= high:
        raise ConfigError(
            f"--trace {text}: {name} must be a number from {low:g} to {high:g}, not {value!r}"
        )
    return number


def _requests(
    numbers: Mapping[str, float], rng: random.Random, block_tokens: int
) -> Iterator[Session]:
    """Single requests, `burst` at a time; a burst shares its first `shared` tokens."""
    now, burst = 0.0, int(numbers.get("burst", 1))
    for number in range(int(numbers["requests"])):
        if number % burst == 0:
            now += rng.expovariate(numbers["rate"] / burst)
        shared, prompt = int(numbers["shared"]), _length(numbers, "prompt", rng)
        group = number // burst if burst > 1 else 0
        blocks = _prompt_blocks(shared, group, number, prompt, block_tokens) if shared else None
        turn = Turn(0.0, prompt, _length(numbers, "output", rng), blocks)
        yield Session(f"g{number}", now, (turn,))


def _conversations(
    numbers: Mapping[str, float], rng: random.Random, block_tokens: int
) -> Iterator[Session]:
    """Conversations that begin with the same `shared` tokens. Each turn's prompt has the whole
    conversation so far, and `prompt` tokens more."""
    now, made, number, shared = 0.0, 0, 0, int(numbers["shared"])
    while made < int(numbers["requests"]):
        now += rng.expovariate(numbers["rate"] / numbers["turns"])
        turns: list[Turn] = []
        said = shared
        for index in range(max(1, round(rng.expovariate(1 / numbers["turns"])))):
            prompt = said + _length(numbers, "prompt", rng)
            output = _length(numbers, "output", rng)
            blocks = _prompt_blocks(shared, 0, number, prompt + output, block_tokens)
            pause = rng.expovariate(1 / numbers["pause"]) if index and numbers["pause"] else 0.0
            turns.append(Turn(pause, prompt, output, blocks))
            said = prompt + output
        made += len(turns)
        yield Session(f"g{number}", now, tuple(turns))
        number += 1


def _prompt_blocks(
    shared: int, group: int, number: int, tokens: int, block_tokens: int
) -> BlockRuns:
    """The blocks of a text: those that its group shares, then its own."""
    common = min(shared, tokens) // block_tokens
    own = tokens // block_tokens - common
    runs = [(group << 16, common), ((1 << 36) + (number << 16), own)]
    kept = tuple((first, count) for first, count in runs if count)
    return BlockRuns(_SHARED_SPACE, block_tokens, kept)


def _length(numbers: Mapping[str, float], name: str, rng: random.Random) -> int:
    """A length from a log-normal distribution with this mean and this relative deviation."""
    variance = log(1 + numbers["spread"] ** 2)
    mean = log(numbers[name]) - variance / 2
    return min(MAX_TOKENS, max(1, round(rng.lognormvariate(mean, sqrt(variance)))))
