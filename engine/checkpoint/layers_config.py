"""The kinds and sizes of a model's layers, from a checkpoint's config.json; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from checkpoint.json_keys import JsonKeys
from engine.checkpoint.delta_config import DeltaConfig, parse_delta
from engine.checkpoint.experts_config import ExpertsConfig, parse_experts, parse_mixture
from engine.checkpoint.mamba_config import MambaConfig, parse_mamba
from engine.checkpoint.mixer_blocks import parse_blocks
from engine.models.architectures import Architecture, LayerKinds

MAX_LAYERS = 4096


@dataclass(frozen=True)
class Layers:
    """By layer: its kinds, whether it keeps a state, and the numbers that its two halves have in
    the checkpoint. Also the sizes of mixtures and of layers that keep a state; None if there are no
    such layers."""

    kinds: tuple[LayerKinds, ...]
    keeps_state: tuple[bool, ...]
    stored_numbers: tuple[tuple[int, int], ...]
    experts: ExpertsConfig | None = None
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None


def parse_layers(keys: JsonKeys, kind: Architecture) -> Layers:
    """The layers of an architecture. Raises ModelLoadError."""
    if kind.has_mixer_blocks:
        return _of_blocks(keys, kind)
    num_layers = keys.integer("num_hidden_layers", maximum=MAX_LAYERS)
    experts, mixed = parse_experts(keys, kind.experts, num_layers)
    delta, keeps_state = _states(keys, kind, num_layers)
    kinds, state_kinds = _by_names(keys, kind)
    found = []
    for is_mixture, keeps in zip(mixed, keeps_state, strict=True):
        each = state_kinds if keeps and state_kinds is not None else kinds
        found.append(replace(each, feed_forward="experts") if is_mixture else each)
    numbers = tuple((number, number) for number in range(num_layers))
    return Layers(tuple(found), keeps_state, numbers, experts, delta)


def _of_blocks(keys: JsonKeys, kind: Architecture) -> Layers:
    blocks = parse_blocks(keys)
    if keys.text("mlp_hidden_act", "relu2") != "relu2":
        raise keys.wrong("mlp_hidden_act", "relu2 or absent")
    usual, state_kinds = _by_names(keys, kind)
    assert state_kinds is not None
    kinds = []
    halves = zip(blocks.keeps_state, blocks.has_feed_forward, blocks.is_mixture, strict=True)
    for keeps, has_feed_forward, is_mixture in halves:
        each = state_kinds if keeps else usual
        if is_mixture:
            each = replace(each, feed_forward="experts")
        elif not has_feed_forward:
            each = replace(each, feed_forward="none", post_norm_name="")
        kinds.append(each)
    experts = None
    if any(blocks.is_mixture):
        assert kind.experts is not None
        if keys.raw("moe_latent_size", None) is not None:
            raise keys.wrong("moe_latent_size", "absent (experts of latents are not supported)")
        experts = parse_mixture(keys, kind.experts, sum(blocks.is_mixture))
    mamba = parse_mamba(keys)
    return Layers(tuple(kinds), blocks.keeps_state, blocks.numbers, experts, mamba=mamba)


def _states(
    keys: JsonKeys, kind: Architecture, num_layers: int
) -> tuple[DeltaConfig | None, tuple[bool, ...]]:
    """The sizes of layers with a gated delta rule, and which layers have it."""
    if kind.state_kinds is None:
        return None, (False,) * num_layers
    if not keys.flag("attn_output_gate", True):
        raise keys.wrong("attn_output_gate", "true or absent")
    return parse_delta(keys, num_layers)


def _by_names(keys: JsonKeys, kind: Architecture) -> tuple[LayerKinds, LayerKinds | None]:
    """The kinds of layers, with the names in the checkpoint's files; and the kinds of layers that
    keep a state."""
    if not keys.flag("is_gguf", False):
        return kind.layer_kinds, kind.state_kinds
    state_kinds = kind.gguf_state_kinds
    if state_kinds is not None and keys.flag("qkvz_by_head", False):
        state_kinds = replace(state_kinds, attention="gated_delta_by_head")
    return kind.gguf_kinds or kind.layer_kinds, state_kinds
