"""Nemotron-H's blocks, which compute one thing each, as layers; from a checkpoint's config.json;
imports no torch.

A block has attention or a state, or it is a feed-forward layer, dense or a mixture of experts. A
layer is a block of the first kind and the feed-forward block that follows it, if one does.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint.json_keys import JsonKeys

_STATE, _ATTENTION, _MLP, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_OLD_NAMES = {"mamba": _STATE, "attention": _ATTENTION}
_BY_SIGN = {"M": _STATE, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}
_LISTS = ("layers_block_type", "layer_types")
_PATTERN = "hybrid_override_pattern"
_MAX_BLOCKS = 4096


@dataclass(frozen=True)
class MixerBlocks:
    """By layer: the numbers of its two blocks in the checkpoint, whether it keeps a state, whether
    it has a feed-forward half, and whether that is a mixture; without one, both numbers are the
    same."""

    numbers: tuple[tuple[int, int], ...]
    keeps_state: tuple[bool, ...]
    has_feed_forward: tuple[bool, ...]
    is_mixture: tuple[bool, ...]


def parse_blocks(keys: JsonKeys) -> MixerBlocks:
    """The blocks as listed, or by the signs of a pattern. Raises ModelLoadError."""
    key, kinds = _kinds(keys)
    numbers: list[tuple[int, int]] = []
    for number, kind in enumerate(kinds):
        if kind not in (_MLP, _EXPERTS):
            numbers.append((number, number))
        elif not numbers or numbers[-1] != (number - 1, number - 1):
            expected = f"such that each {kind} follows a block with attention or a state"
            raise keys.wrong(key, expected)
        else:
            numbers[-1] = (number - 1, number)
    states = tuple(kinds[first] == _STATE for first, _ in numbers)
    if all(states) or not any(states):
        raise keys.wrong(key, f"made of {_STATE} and {_ATTENTION}, of both at least one")
    return MixerBlocks(
        tuple(numbers),
        states,
        tuple(first != second for first, second in numbers),
        tuple(kinds[second] == _EXPERTS for _, second in numbers),
    )


def _kinds(keys: JsonKeys) -> tuple[str, list[str]]:
    """The key, and what each block is."""
    key = next((each for each in _LISTS if each in keys), _PATTERN)
    if key == _PATTERN:
        signs = keys.text(key)
        if not set(signs) <= _BY_SIGN.keys() or not 0 < len(signs) <= _MAX_BLOCKS:
            raise keys.wrong(key, f"made of {', '.join(_BY_SIGN)}")
        return key, [_BY_SIGN[sign] for sign in signs]
    names = keys.raw(key)
    if not isinstance(names, list) or not 0 < len(names) <= _MAX_BLOCKS:
        raise keys.wrong(key, "a list of names")
    kinds = [_OLD_NAMES.get(name, name) if isinstance(name, str) else "" for name in names]
    if not set(kinds) <= set(_BY_SIGN.values()):
        raise keys.wrong(key, f"made of {', '.join(_BY_SIGN.values())}")
    return key, kinds
