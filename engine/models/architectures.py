"""The architectures that Baton loads, and the differences between them; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

CLAMPED_SWIGLU = "clamped_swiglu"
"""gpt-oss's activation; see `engine.layers.ops`."""


@dataclass(frozen=True)
class LayerKinds:
    """The kinds of a layer's attention and feed-forward half, by their names in
    `engine.layers.kinds`, and the names of its parts in the checkpoint. A half's result is normed
    before it is added if that norm has a name here."""

    attention: str = "grouped"
    feed_forward: str = "gated"
    input_norm_name: str = "input_layernorm"
    attention_name: str = "self_attn"
    post_norm_name: str = "post_attention_layernorm"
    feed_forward_name: str = "mlp"
    attention_out_norm_name: str = ""
    feed_forward_out_norm_name: str = ""


@dataclass(frozen=True)
class ExpertKeys:
    """How a `config.json` describes its mixture of experts: the names of its keys, and properties
    that no key gives."""

    count: tuple[str, ...] = ("num_experts", "num_local_experts")  # the first key that is present
    inner: str = "moe_intermediate_size"
    router_name: str = "gate"  # of the router's tensors
    has_biases: bool = False  # of the router and of each expert's products
    are_paired: bool = False  # outputs of gate and up alternate; matrices have inputs first
    normalizes: bool | None = None  # weights add up to 1; None: as norm_topk_prob says
    routes_in_groups: bool = False  # DeepSeek's keys
    default_method: str = "noaux_tc"  # without topk_method
    shared_name: str = ""  # of the shared expert's tensors; "" if there is none
    shared_inner: str = ""  # "": n_shared_experts times an expert's
    gates_shared: bool = False
    are_gated: bool = True  # else up, the square of ReLU, down


@dataclass(frozen=True)
class Architecture:
    """How an architecture differs from the others; the defaults follow transformers."""

    configurable_biases: bool  # honours the keys of biases below
    qkv_bias_keys: tuple[str, ...] = ("attention_bias",)  # the first of them that is there
    o_bias_keys: tuple[str, ...] = ("attention_bias",)
    mlp_bias_keys: tuple[str, ...] = ()
    bias_default: bool = False  # of qkv_bias_keys
    qkv_bias: bool = False  # always has biases on q, k, v (and none on o)
    qk_norm: bool = False
    multi_head_default: bool = False  # without num_key_value_heads, one KV head per query head
    head_dim_required: bool = False
    head_dim_keys: tuple[str, ...] = ("head_dim",)  # the first of them that is there
    windows: str = "none"
    """Or "refused", "uniform" (Mistral), "layers" (Qwen), "listed" (dots.llm1), "by turns": all
    but each `window_turn`-th layer have one (Gemma)."""
    window_turn: int = 0
    default_window: int | None = 4096  # of "uniform" windows
    default_full_layers: int = 28  # of "layers" and "listed" ones: first layers without one
    scales_queries: bool = False  # by their positions (llama_4_scaling_beta)
    has_local_rope: bool = False  # layers with windows have a rotary embedding of their own
    has_query_scalar: bool = False  # scores are divided by the root of query_pre_attn_scalar
    caps: tuple[str, ...] = ()  # of "attn" and "final": logits that a key may cap
    scales_embeddings: bool = False  # by the root of hidden_size
    norms_from_zero: bool = False  # safetensors hold the norms' weights minus 1
    has_sinks: bool = False  # logits of each head that take part in its softmax, without a value
    rotates_part: bool = False  # of a head: partial_rotary_factor
    state_kinds: LayerKinds | None = None  # of layers that keep a state; which: their config says
    has_mixer_blocks: bool = False  # blocks of one half each: see `engine.checkpoint.mixer_blocks`
    eps_key: str = "rms_norm_eps"
    activation_key: str = "hidden_act"
    activation: str = ""  # overrides the key
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that transformers does not write, or that published files leave out."""
    has_text_config: bool = False  # the language model's keys are in a table of that name
    layer_kinds: LayerKinds = LayerKinds()  # of all layers
    gguf_kinds: LayerKinds | None = None  # if names differ in GGUF files: `layer_kinds` there
    gguf_state_kinds: LayerKinds | None = None
    experts: ExpertKeys | None = None  # keys of the mixtures, if layers are mixtures


_LLAMA = Architecture(
    configurable_biases=True, mlp_bias_keys=("mlp_bias",), multi_head_default=True
)
_MISTRAL = Architecture(configurable_biases=False, windows="uniform")
_MINISTRAL_3 = Architecture(
    configurable_biases=False,
    head_dim_required=True,
    windows="uniform",
    default_window=None,
    scales_queries=True,
)
_QWEN_2 = Architecture(configurable_biases=False, qkv_bias=True, windows="layers")
_GEMMA_2 = Architecture(
    configurable_biases=True,
    windows="by turns",
    window_turn=2,
    has_query_scalar=True,
    caps=("attn", "final"),
    scales_embeddings=True,
    norms_from_zero=True,
    activation_key="hidden_activation",
    layer_kinds=LayerKinds(
        attention_out_norm_name="post_attention_layernorm",
        post_norm_name="pre_feedforward_layernorm",
        feed_forward_out_norm_name="post_feedforward_layernorm",
    ),
    gguf_kinds=LayerKinds(
        attention_out_norm_name="post_attention_norm", feed_forward_out_norm_name="post_ffw_norm"
    ),
    defaults={
        "vocab_size": 256_000,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
)
_GEMMA_3 = replace(
    _GEMMA_2,
    qk_norm=True,
    window_turn=6,
    has_local_rope=True,
    caps=("final",),
    defaults={
        **_GEMMA_2.defaults,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
)
DEEPSEEK_EXPERTS = ExpertKeys(
    count=("n_routed_experts",), routes_in_groups=True, shared_name="shared_experts"
)
_DEEPSEEK_V3 = Architecture(
    configurable_biases=True,
    layer_kinds=LayerKinds(attention="latent"),
    experts=DEEPSEEK_EXPERTS,
)
_GATED_SHARED = ExpertKeys(
    shared_name="shared_expert",
    shared_inner="shared_expert_intermediate_size",
    gates_shared=True,
)
_GPT_OSS = Architecture(
    configurable_biases=True,
    bias_default=True,
    windows="by turns",
    window_turn=2,
    has_sinks=True,
    activation=CLAMPED_SWIGLU,
    experts=ExpertKeys(
        count=("num_local_experts",),
        inner="intermediate_size",
        router_name="router",
        has_biases=True,
        are_paired=True,
        normalizes=True,
    ),
    gguf_kinds=LayerKinds(post_norm_name="post_attention_norm"),
    defaults={
        "head_dim": 64,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
)
_QWEN_3_NEXT = Architecture(
    configurable_biases=True,
    qk_norm=True,
    norms_from_zero=True,
    rotates_part=True,
    layer_kinds=LayerKinds(attention="output_gated"),
    state_kinds=LayerKinds(attention="gated_delta_by_head", attention_name="linear_attn"),
    gguf_kinds=LayerKinds(attention="output_gated", post_norm_name="post_attention_norm"),
    gguf_state_kinds=LayerKinds(
        attention="gated_delta_gates_by_head",
        attention_name="linear_attn",
        post_norm_name="post_attention_norm",
    ),
    experts=_GATED_SHARED,
    defaults={
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)
_QWEN_3_5 = replace(
    _QWEN_3_NEXT,
    state_kinds=LayerKinds(attention="gated_delta", attention_name="linear_attn"),
    gguf_state_kinds=LayerKinds(
        attention="gated_delta",
        attention_name="linear_attn",
        post_norm_name="post_attention_norm",
    ),
    experts=None,
    has_text_config=True,
)
_QWEN_3_5_MOE = replace(
    _QWEN_3_5,
    experts=replace(_GATED_SHARED, normalizes=True),
    defaults={**_QWEN_3_NEXT.defaults, "intermediate_size": 5632},  # required, but no layer uses it
)
_NEMOTRON_H = Architecture(
    configurable_biases=True,
    mlp_bias_keys=("mlp_bias",),
    eps_key="layer_norm_epsilon",
    head_dim_keys=("head_dim", "attention_head_dim"),
    has_mixer_blocks=True,
    layer_kinds=LayerKinds("unrotated", "squared_relu", "norm", "mixer", "norm", "mixer"),
    state_kinds=LayerKinds("mamba2", "squared_relu", "norm", "mixer", "norm", "mixer"),
    gguf_kinds=LayerKinds("unrotated", "squared_relu", post_norm_name="input_layernorm"),
    gguf_state_kinds=LayerKinds(
        "mamba2",
        "squared_relu",
        attention_name="linear_attn",
        post_norm_name="input_layernorm",
    ),
    experts=ExpertKeys(
        count=("n_routed_experts",),
        routes_in_groups=True,
        shared_name="shared_experts",
        shared_inner="moe_shared_expert_intermediate_size",
        are_gated=False,
    ),
    defaults={"layer_norm_epsilon": 1e-5, "norm_topk_prob": True},
)
ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "LLaMAForCausalLM": _LLAMA,
    "IQuestCoderForCausalLM": replace(_LLAMA, windows="refused"),
    "Telechat3ForCausalLM": _LLAMA,
    "TeleChat3ForCausalLM": _LLAMA,  # as vLLM spells it
    "InternLM3ForCausalLM": Architecture(
        configurable_biases=True,
        qkv_bias_keys=("qkv_bias", "attention_bias"),
        o_bias_keys=("bias", "attention_bias"),
        mlp_bias_keys=("bias", "mlp_bias"),
    ),
    "SeedOssForCausalLM": Architecture(
        configurable_biases=True,
        o_bias_keys=("attention_out_bias",),
        mlp_bias_keys=("mlp_bias",),
        bias_default=True,
        head_dim_required=True,
    ),
    "MistralForCausalLM": _MISTRAL,
    "Ministral3ForCausalLM": _MINISTRAL_3,
    "Mistral3ForConditionalGeneration": replace(_MISTRAL, has_text_config=True),
    "Qwen2ForCausalLM": _QWEN_2,
    "MiMoForCausalLM": _QWEN_2,  # its layers for predicting several tokens are left out
    "Qwen3ForCausalLM": Architecture(
        configurable_biases=True, qk_norm=True, head_dim_required=True, windows="layers"
    ),
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA_3, has_text_config=True),
    "GptOssForCausalLM": _GPT_OSS,
    "MixtralForCausalLM": Architecture(
        configurable_biases=False,
        windows="uniform",
        default_window=None,
        experts=ExpertKeys(
            count=("num_local_experts",), inner="intermediate_size", normalizes=True
        ),
    ),
    "Qwen2MoeForCausalLM": Architecture(
        configurable_biases=True,
        qkv_bias_keys=("qkv_bias",),
        o_bias_keys=(),
        bias_default=True,
        windows="layers",
        experts=_GATED_SHARED,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        configurable_biases=True, qk_norm=True, windows="refused", experts=ExpertKeys()
    ),
    "Dots1ForCausalLM": Architecture(
        configurable_biases=True,
        o_bias_keys=(),
        qk_norm=True,
        multi_head_default=True,
        windows="listed",
        default_full_layers=62,
        experts=DEEPSEEK_EXPERTS,
    ),
    "DeepseekV2ForCausalLM": replace(
        _DEEPSEEK_V3,
        mlp_bias_keys=("mlp_bias",),
        experts=replace(DEEPSEEK_EXPERTS, normalizes=False, default_method="greedy"),
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "KimiK2ForCausalLM": _DEEPSEEK_V3,
    "NemotronHForCausalLM": _NEMOTRON_H,
    "Qwen3NextForCausalLM": _QWEN_3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN_3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN_3_5,
    "Qwen3_5MoeForCausalLM": _QWEN_3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_3_5_MOE,
}
"""Architectures by their name in a checkpoint's `architectures`."""
TEXT_KINDS = {
    "Mistral3ForConditionalGeneration": {
        "mistral": ARCHITECTURES["Mistral3ForConditionalGeneration"],
        "ministral3": replace(_MINISTRAL_3, has_text_config=True),
    },
}
"""Of architectures with several language models, these by the `model_type` of `text_config`; the
first one is the default."""
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "iquestcoder": "IQuestCoderForCausalLM",
    "telechat3": "Telechat3ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2": "Qwen2ForCausalLM",
    "mimo": "MiMoForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "KimiK2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
"""Architectures by a checkpoint's `model_type`, for checkpoints that name no architecture."""
