"""The weights of a model, and the place in them of each tensor of its checkpoint.

The kinds of layers (`engine.layers.kinds`) say which tensors they have and which are packed into
one weight. Reads no file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.checkpoint.layer_tensors import KindWeights, LayerTensor, Split
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.quantized_blocks import BlockMatrix, Matrix
from engine.checkpoint.tensor_places import Place
from engine.layers.kinds import ATTENTION, FEED_FORWARD
from engine.models.architectures import LayerKinds

EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FINAL_NORM = "model.norm.weight"

Places = dict[str, Place]
"""The destination of each tensor of the checkpoint, by its name there."""


@dataclass
class LayerWeights:
    """One layer: the weights of its kinds, and its norms, [hidden], fp32. The `_out_norm`s are the
    norms of the results of attention and feed-forward; None if the layer has none."""

    input_norm: torch.Tensor
    attention: KindWeights
    post_norm: torch.Tensor | None  # None: nothing follows the attention
    feed_forward: KindWeights
    attention_out_norm: torch.Tensor | None = None
    feed_forward_out_norm: torch.Tensor | None = None


@dataclass
class Weights:
    """All weights of a model, on one device. They have one dtype, except norms, which are fp32.
    `lm_head` is `embed` if they are tied. Quantized weights may be blocks instead, which are a
    mapping of their file."""

    embed: torch.Tensor | BlockMatrix  # [vocab, H]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [H]
    lm_head: torch.Tensor | BlockMatrix  # [vocab, H]


def empty_weights(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, kept: Collection[str] = ()
) -> Weights:
    """Weights of the model's shapes, not initialised. Weights whose tensors are `kept` elsewhere
    take no memory."""

    def empty(*shape: int, is_wide: bool = False, names: Sequence[str] = ()) -> torch.Tensor:
        is_kept = bool(names) and all(name in kept for name in names)
        place = torch.device("meta") if is_kept else device
        return torch.empty(shape, dtype=torch.float32 if is_wide else dtype, device=place)

    def half(name: str, tensors: Sequence[LayerTensor]) -> KindWeights:
        weights = KindWeights()
        for each in tensors:
            is_matrix = each.inputs is not None and not each.is_wide
            found = weights.matrices if is_matrix else weights.vectors
            names = [f"{name}.{rows.name}" for rows in each.rows]
            found[each.name] = empty(*each.shape, is_wide=each.is_wide, names=names)
        return weights

    hidden = config.hidden_size
    layers = []
    pairs = zip(config.layer_kinds, config.stored_numbers, strict=True)
    for kinds, (number, feed_forward_number) in pairs:
        tensors = ATTENTION[kinds.attention].tensors(config)
        attention = half(f"model.layers.{number}.{kinds.attention_name}", tensors)
        tensors = FEED_FORWARD[kinds.feed_forward].tensors(config)
        name = f"model.layers.{feed_forward_number}.{kinds.feed_forward_name}"
        norms = (
            kinds.post_norm_name, kinds.attention_out_norm_name, kinds.feed_forward_out_norm_name,
        )  # fmt: skip
        post, *outs = (empty(hidden, is_wide=True) if each else None for each in norms)
        input_norm = empty(hidden, is_wide=True)
        layers.append(LayerWeights(input_norm, attention, post, half(name, tensors), *outs))
    num_tokens = len(config.own_tokens)
    embed = empty(num_tokens if _needs_embed(config) else 0, hidden)
    lm_head = embed
    if not config.tie_word_embeddings:
        num_rows = num_tokens if config.gives_logits else 0
        lm_head = empty(num_rows, hidden, names=[LM_HEAD])
    final_norm = empty(hidden, is_wide=True)
    return Weights(embed=embed, layers=layers, final_norm=final_norm, lm_head=lm_head)


def places_in(config: ModelConfig, weights: Weights) -> Places:
    """The places of all tensors, as views into `weights`."""
    places = {_FINAL_NORM: _norm_place(weights.final_norm, config)}
    if _needs_embed(config):
        places[EMBED] = Place(plain(weights.embed), Split.TOKENS)
    if config.gives_logits and not config.tie_word_embeddings:
        places[LM_HEAD] = Place(plain(weights.lm_head), Split.TOKENS)
    for names, kinds, layer in _layers(config, weights):
        for name, norm_name, norm in (
            (names[0], kinds.input_norm_name, layer.input_norm),
            (names[0], kinds.attention_out_norm_name, layer.attention_out_norm),
            (names[1], kinds.post_norm_name, layer.post_norm),
            (names[1], kinds.feed_forward_out_norm_name, layer.feed_forward_out_norm),
        ):
            if norm is not None:
                places[f"{name}.{norm_name}.weight"] = _norm_place(norm, config)
    for name, tensors, half in halves(config, weights):
        for each in tensors:
            whole = half.vectors.get(each.name)
            whole = plain(half.matrices[each.name]) if whole is None else whole
            for rows, part in zip(each.rows, rows_of(each, whole), strict=True):
                heads = rows.num_heads if config.qk_rows_in_pairs else None
                places[f"{name}.{rows.name}"] = Place(
                    part, each.split, heads, each.is_wide, each.offset, rows.middle,
                    rows.sections, each.input_sections,
                )  # fmt: skip
    return places


def _norm_place(norm: torch.Tensor, config: ModelConfig) -> Place:
    return Place(norm, is_wide=True, offset=config.norm_offset)


def halves(
    config: ModelConfig, weights: Weights
) -> Iterator[tuple[str, Sequence[LayerTensor], KindWeights]]:
    """The two halves of every layer, attention and feed-forward: name, tensors and weights."""
    for names, kinds, layer in _layers(config, weights):
        tensors = ATTENTION[kinds.attention].tensors(config)
        yield f"{names[0]}.{kinds.attention_name}", tensors, layer.attention
        tensors = FEED_FORWARD[kinds.feed_forward].tensors(config)
        yield f"{names[1]}.{kinds.feed_forward_name}", tensors, layer.feed_forward


def _layers(
    config: ModelConfig, weights: Weights
) -> Iterator[tuple[tuple[str, str], LayerKinds, LayerWeights]]:
    """For every layer, the names of its halves' blocks in the checkpoint, its kinds and its
    weights."""
    layers = zip(config.stored_numbers, config.layer_kinds, weights.layers, strict=True)
    for (number, feed_forward_number), kinds, layer in layers:
        names = f"model.layers.{number}", f"model.layers.{feed_forward_number}"
        yield names, kinds, layer


def _needs_embed(config: ModelConfig) -> bool:
    """Whether the model's part needs the embedding. The part with the first layer does, and so does
    the part with the last layer if the embedding is tied to the logits."""
    return config.embeds or (config.tie_word_embeddings and config.gives_logits)


def rows_of(packed: LayerTensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views of the rows of each tensor."""
    return weight.split([rows.count for rows in packed.rows])


def plain(weight: Matrix) -> torch.Tensor:
    """A weight that is a tensor."""
    assert isinstance(weight, torch.Tensor)
    return weight
