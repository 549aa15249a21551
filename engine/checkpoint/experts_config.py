"""How a mixture of experts chooses its experts, from a checkpoint's config.json; imports no torch.

`engine.models.architectures` names an architecture's keys. Which layers are mixtures follows from
them, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from checkpoint.json_keys import JsonKeys
from engine.models.architectures import ExpertKeys
from protocol.errors import ConfigError

MAX_EXPERTS = 1024
MAX_PER_TOKEN = 64
_MAX_IN_ALL_LAYERS = 1 << 16
"""The most experts: the tensors of each are listed before they are compared with the files."""
_MAX_INNER = 1 << 22


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a layer, each a feed-forward layer of `inner` numbers.

    A token's scores are the softmax of the router's logits, or their sigmoids. The `per_token`
    experts with the largest scores are chosen. With `has_choice_bias`, a bias is added to the
    scores for the choice alone. If there are several `groups` of experts, only those of
    `chosen_groups` groups may be chosen; a group's score is its largest score or, with `sums_two`,
    the sum of its two largest. The experts' results are weighted by their scores, divided by their
    sum if `normalizes`, times `scale`. The result of a shared expert of `shared_inner` numbers (0:
    none) is added for every token. With `gates_shared`, this result is multiplied by a sigmoid of
    its own.
    """

    count: int
    per_token: int
    inner: int
    scoring: str = "softmax"  # or "sigmoid"
    normalizes: bool = True
    scale: float = 1.0
    has_choice_bias: bool = False
    groups: int = 1
    chosen_groups: int = 1
    sums_two: bool = False
    shared_inner: int = 0
    shared_name: str = ""  # in the checkpoint
    gates_shared: bool = False
    router_name: str = "gate"  # in the checkpoint
    has_biases: bool = False  # of the router's logits and of each expert's products
    are_paired: bool = False  # in the checkpoint: see `engine.checkpoint.formats.paired_experts`
    are_gated: bool = True  # else each computes `down(relu(up(x)) ** 2)`

    def sharded(self, tp_size: int) -> ExpertsConfig:
        """One of `tp_size` ranks' share of every expert. Raises ConfigError."""
        for name, size in (("an expert's", self.inner), ("the shared expert's", self.shared_inner)):
            if size % tp_size:
                raise ConfigError(
                    f"{name} intermediate size {size} cannot be split over {tp_size} ranks"
                )
        return replace(self, inner=self.inner // tp_size, shared_inner=self.shared_inner // tp_size)


def parse_experts(
    keys: JsonKeys, kind: ExpertKeys | None, num_layers: int
) -> tuple[ExpertsConfig | None, tuple[bool, ...]]:
    """The experts, and which layers have them; None if none has. Raises ModelLoadError."""
    if kind is None:
        return None, (False,) * num_layers
    mixed = _mixed_layers(keys, num_layers)
    if not any(mixed):
        return None, mixed
    return parse_mixture(keys, kind, sum(mixed)), mixed


def parse_mixture(keys: JsonKeys, kind: ExpertKeys, num_mixtures: int) -> ExpertsConfig:
    """The experts of each of so many layers. Raises ModelLoadError."""
    count_key = next((key for key in kind.count if key in keys), kind.count[0])
    count = keys.integer(count_key, minimum=2, maximum=MAX_EXPERTS)
    if count * num_mixtures > _MAX_IN_ALL_LAYERS:
        raise keys.wrong(count_key, f"at most {_MAX_IN_ALL_LAYERS} for all layers together")
    per_token = keys.integer("num_experts_per_tok", maximum=MAX_PER_TOKEN)
    if per_token > count:
        raise keys.wrong("num_experts_per_tok", f"at most {count_key} ({count})")
    is_gguf = keys.flag("is_gguf", False)
    normalizes = kind.normalizes
    if normalizes is None:
        normalizes = keys.flag("norm_topk_prob", False)
    experts = ExpertsConfig(
        count,
        per_token,
        inner=keys.integer(kind.inner, maximum=_MAX_INNER),
        normalizes=normalizes,
        router_name="gate" if is_gguf else kind.router_name,
        are_paired=kind.are_paired and not is_gguf,
        has_biases=kind.has_biases,
        are_gated=kind.are_gated,
    )
    if kind.routes_in_groups:
        experts = _in_groups(keys, kind, experts)
    return _with_shared(keys, kind, experts)


def _mixed_layers(keys: JsonKeys, num_layers: int) -> tuple[bool, ...]:
    """Which layers are mixtures, by either convention: every n-th layer except the listed ones
    (Qwen), or all layers except the first ones (DeepSeek)."""
    step = keys.integer("decoder_sparse_step", 1)
    dense = keys.raw("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(each) is int for each in dense):
        raise keys.wrong("mlp_only_layers", "a list of layers' numbers")
    dense = frozenset(dense)
    first = keys.integer("first_k_dense_replace", 0, minimum=0)
    if keys.integer("moe_layer_freq", 1) != 1:
        raise keys.wrong("moe_layer_freq", "1 or absent")
    return tuple(
        layer >= first and layer not in dense and (layer + 1) % step == 0
        for layer in range(num_layers)
    )


def _in_groups(keys: JsonKeys, kind: ExpertKeys, experts: ExpertsConfig) -> ExpertsConfig:
    """`experts` with the way that DeepSeek chooses them: V3's (`noaux_tc`), or one of V2's two."""
    method = keys.text("topk_method", kind.default_method)
    if method not in ("noaux_tc", "greedy", "group_limited_greedy"):
        raise keys.wrong("topk_method", "noaux_tc, greedy or group_limited_greedy")
    has_bias = method == "noaux_tc"
    scoring = keys.text("scoring_func", "sigmoid" if has_bias else "softmax")
    scoring = "sigmoid" if scoring == "noaux_tc" else scoring  # as dots.llm1 spells it
    if scoring not in ("softmax", "sigmoid"):
        raise keys.wrong("scoring_func", "softmax or sigmoid")
    groups = 1 if method == "greedy" else keys.integer("n_group", 1)
    chosen = 1 if method == "greedy" else keys.integer("topk_group", 1)
    if experts.count % groups:
        raise keys.wrong("n_group", f"a divisor of the number of experts ({experts.count})")
    if chosen > groups:
        raise keys.wrong("topk_group", f"at most n_group ({groups})")
    size = experts.count // groups
    if chosen * size < experts.per_token or (has_bias and groups > 1 and size < 2):
        raise keys.wrong("n_group", "so small that the chosen groups have enough experts")
    return replace(
        experts,
        scoring=scoring,
        scale=keys.number("routed_scaling_factor", 1.0),
        has_choice_bias=has_bias,
        groups=groups,
        chosen_groups=chosen,
        sums_two=has_bias,
    )


def _with_shared(keys: JsonKeys, kind: ExpertKeys, experts: ExpertsConfig) -> ExpertsConfig:
    if not kind.shared_name:
        return experts
    if kind.shared_inner:
        inner = keys.integer(kind.shared_inner, minimum=0, maximum=_MAX_INNER)
    else:
        most = _MAX_INNER // experts.inner
        inner = keys.integer("n_shared_experts", 0, minimum=0, maximum=most) * experts.inner
    gated = kind.gates_shared and inner > 0
    name = "shared_experts" if keys.flag("is_gguf", False) else kind.shared_name
    return replace(experts, shared_inner=inner, shared_name=name, gates_shared=gated)
