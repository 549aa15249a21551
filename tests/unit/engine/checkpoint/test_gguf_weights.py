"""GGUF checkpoints: the configuration and the weights of the checkpoint they were made from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import pytest
import torch

from checkpoint.model_source import resolve_model
from engine.checkpoint.config import load_model_config
from engine.checkpoint.files import model_fingerprint
from engine.checkpoint.gguf_names import hugging_face_name, llama_cpp_name
from engine.checkpoint.quantized_blocks import BlockMatrix, MatrixStack
from engine.checkpoint.shard import Shard
from engine.checkpoint.weights import load_block_weights, load_weights
from engine.cpu.backend import CpuBackend
from engine.layers.rope import Rope
from engine.models.decoder import DecoderModel
from tests.gguf_files import write_gguf
from tests.latent_models import LATENT_MODELS
from tests.unit.engine.models.test_decoder import TABLE

NAMES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
F32 = gguf.GGUFValueType.FLOAT32
TEXT = gguf.GGUFValueType.STRING


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of these files are not for anybody's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folder_of(tmp_path: Path, tiny, name: str, **options) -> tuple[Path, dict[str, torch.Tensor]]:
    file = tmp_path / "tiny.gguf"
    values = write_gguf(file, tiny.folder, name, **options)
    return resolve_model(file), values


def fused(values: dict[str, torch.Tensor], index: int, room: str, names: tuple[str, ...]):
    return torch.cat([values[f"model.layers.{index}.{room}.{name}_proj.weight"] for name in names])


@pytest.mark.parametrize("architecture", NAMES)
def test_each_family_is_loaded(make_tiny, tmp_path, architecture):
    tiny = make_tiny(architecture, tie_word_embeddings=architecture == "Qwen2ForCausalLM")
    folder, values = folder_of(tmp_path, tiny, NAMES[architecture])
    ours, theirs = load_model_config(folder), load_model_config(tiny.folder)
    changed = {
        "eos_token_ids": (2,),
        "rms_norm_eps": pytest.approx(theirs.rms_norm_eps),
        "qk_rows_in_pairs": NAMES[architecture] == "llama",
    }
    for field in dataclasses.fields(theirs):
        expected = changed.get(field.name, getattr(theirs, field.name))
        assert getattr(ours, field.name) == expected, field.name
    weights = load_weights(folder, ours)
    for index, layer in enumerate(weights.layers):
        assert torch.equal(
            layer.attention.matrices["qkv"], fused(values, index, "self_attn", ("q", "k", "v"))
        )
        assert torch.equal(
            layer.feed_forward.matrices["gate_up"], fused(values, index, "mlp", ("gate", "up"))
        )
        assert torch.equal(
            layer.feed_forward.matrices["down"], fused(values, index, "mlp", ("down",))
        )
        assert torch.equal(layer.attention.matrices["o"], fused(values, index, "self_attn", ("o",)))
    reference = load_weights(tiny.folder, theirs)
    assert torch.equal(weights.embed, reference.embed)
    assert torch.equal(weights.lm_head, reference.lm_head)
    assert torch.equal(weights.final_norm, reference.final_norm)
    if ours.qkv_bias:
        assert torch.equal(
            weights.layers[1].attention.vectors["qkv_bias"],
            reference.layers[1].attention.vectors["qkv_bias"],
        )
    if ours.qk_norm:
        assert torch.equal(
            weights.layers[1].attention.vectors["q_norm"],
            reference.layers[1].attention.vectors["q_norm"],
        )


MIXTURES = {
    "MixtralForCausalLM": ("llama", {"num_local_experts": 4}),
    "Qwen3MoeForCausalLM": (
        "qwen3moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
}


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_mixtures_are_loaded(make_tiny, tmp_path, architecture, kind):
    """One tensor holds an expert after the other, in blocks, too; routers stay fp32."""
    name, options = MIXTURES[architecture]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    tiny = make_tiny(architecture, **sizes, **options)
    (tiny.folder / "model.safetensors").unlink()
    tiny.reference.save_pretrained(tiny.folder, save_original_format=False)
    folder, values = folder_of(tmp_path, tiny, name, kind=kind)
    config = load_model_config(folder)
    assert config.architecture == architecture
    assert config.experts == load_model_config(tiny.folder).experts
    assert config.experts is not None
    load, plain = load_block_weights, values_of
    if kind == "F32":
        load, plain = load_weights, torch.clone
    for index, layer in enumerate(load(folder, config, dtype=torch.float32).layers):
        half, prefix = layer.feed_forward, f"model.layers.{index}.mlp"
        assert torch.equal(half.vectors["router"], values[f"{prefix}.gate.weight"])
        for expert in range(config.experts.count):
            parts = [
                values[f"{prefix}.experts.{part}_proj.weight"][expert]
                for part in ("gate", "up", "down")
            ]
            assert torch.equal(plain(half.matrices[f"gate_up.{expert}"]), torch.cat(parts[:2]))
            assert torch.equal(plain(half.matrices[f"down.{expert}"]), parts[2])


LATENT_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}


@pytest.mark.parametrize("stored", [("F32", False), ("F32", True), ("Q8_0", False), ("Q8_0", True)])
@pytest.mark.parametrize("name", ["deepseek v2", "deepseek v2 lite", "deepseek v3"])
def test_latent_attention_is_loaded(make_tiny, tmp_path, paged_model, text, name, stored):
    """The file's model computes what transformers computes with its values."""
    kind, splits_kv_b = stored
    architecture, options = LATENT_MODELS[name]
    sizes = LATENT_SIZES | ({"q_lora_rank": None} if options["q_lora_rank"] is None else {})
    tiny = make_tiny(architecture, **(options | sizes))
    (tiny.folder / "model.safetensors").unlink()
    tiny.reference.save_pretrained(tiny.folder, save_original_format=False)
    options = {"kind": kind, "splits_kv_b": splits_kv_b}
    folder, values = folder_of(tmp_path, tiny, "deepseek2", **options)
    config, theirs = load_model_config(folder), load_model_config(tiny.folder)
    assert config.architecture == architecture
    assert config.experts == theirs.experts
    assert config.latent is not None
    assert theirs.latent is not None
    assert dataclasses.replace(config.latent, kv_b_in_parts=False) == dataclasses.replace(
        theirs.latent, softmax_scale=pytest.approx(theirs.latent.softmax_scale)
    )
    assert config.latent.kv_b_in_parts == splits_kv_b
    if kind == "F32":
        tokens = text(30)
        logits = paged_model(folder).in_chunks(tokens, 23, TABLE)
        torch.testing.assert_close(logits, tiny.expected_logits(tokens), rtol=0, atol=1e-4)
        return
    for index, layer in enumerate(load_block_weights(folder, config, torch.float32).layers):
        prefix, matrices = f"model.layers.{index}.self_attn", layer.attention.matrices
        kv_a = values[f"{prefix}.kv_a_proj_with_mqa.weight"]
        assert torch.equal(values_of(matrices["kv_a"]), kv_a)
        if splits_kv_b:
            keys = values[f"blk.{index}.attn_k_b.weight"]
            assert torch.equal(values_of(matrices["k_b"]), keys.flatten(0, 1))
        else:
            assert torch.equal(values_of(matrices["kv_b"]), values[f"{prefix}.kv_b_proj.weight"])


@pytest.mark.parametrize("splits_kv_b", [False, True])
def test_latent_attention_is_computed_with_weights_in_blocks(
    make_tiny, tmp_path, paged_model, text, kernels, splits_kv_b
):
    """As close to fp32 arithmetic as with the same weights in bf16."""
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    architecture, options = LATENT_MODELS["deepseek v3 dense"]
    tiny = make_tiny(architecture, **(options | LATENT_SIZES))
    folder, _ = folder_of(tmp_path, tiny, "deepseek2", kind="Q8_0", splits_kv_b=splits_kv_b)
    config = load_model_config(folder)
    assert config.dtype == "bfloat16"
    tokens, wide = text(40), dataclasses.replace(config, dtype="float32")
    exact = paged_model(folder, config=wide).in_chunks(tokens, 40, TABLE)
    paged = paged_model(folder, kernels=kernels)
    dense = paged.in_chunks(tokens, 30, TABLE)
    backend = CpuBackend(config, config.dtype, kernels, keeps_blocks=True)
    weights = load_block_weights(folder, config, torch.bfloat16)
    paged.model = DecoderModel(config, weights, backend)
    found = paged.in_chunks(tokens, 30, TABLE)
    assert (found - exact).abs().mean() < 1.1 * (dense - exact).abs().mean()


def test_biases_of_llama_are_permuted_too(make_tiny, tmp_path):
    tiny = make_tiny(attention_bias=True, mlp_bias=True)
    folder, _ = folder_of(tmp_path, tiny, "llama")
    ours = load_weights(folder, load_model_config(folder))
    theirs = load_weights(tiny.folder, load_model_config(tiny.folder))
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(mine.attention.vectors["qkv_bias"], other.attention.vectors["qkv_bias"])
        assert torch.equal(mine.attention.vectors["o_bias"], other.attention.vectors["o_bias"])
        assert torch.equal(
            mine.feed_forward.vectors["gate_up_bias"], other.feed_forward.vectors["gate_up_bias"]
        )


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_values_are_those_of_the_gguf_package(make_tiny, tmp_path, kind):
    tiny = make_tiny(hidden_size=96, intermediate_size=64)
    folder, values = folder_of(tmp_path, tiny, "llama", kind=kind)
    config = load_model_config(folder)
    assert config.dtype == ("float16" if kind == "F16" else "bfloat16")
    weights = load_weights(folder, config, dtype=torch.float32)
    for index, layer in enumerate(weights.layers):
        assert torch.equal(
            layer.attention.matrices["qkv"], fused(values, index, "self_attn", ("q", "k", "v"))
        )
        assert torch.equal(
            layer.feed_forward.matrices["gate_up"], fused(values, index, "mlp", ("gate", "up"))
        )
    assert torch.equal(weights.embed, values["model.embed_tokens.weight"])


def test_weights_in_blocks_have_the_same_values(make_tiny, tmp_path):
    """Norms and biases, which are no matrices, are dequantized wherever they are quantized."""
    tiny = make_tiny(hidden_size=96, intermediate_size=64, mlp_bias=True)
    options = {"kind": "Q8_0", "has_vectors_of_kind": True}
    folder, values = folder_of(tmp_path, tiny, "llama", **options)
    weights = load_block_weights(folder, load_model_config(folder), torch.float32)
    assert torch.equal(values_of(weights.embed), values["model.embed_tokens.weight"])
    assert torch.equal(values_of(weights.lm_head), values["lm_head.weight"])
    assert torch.equal(weights.final_norm, values["model.norm.weight"])
    for index, layer in enumerate(weights.layers):
        assert torch.equal(
            values_of(layer.attention.matrices["qkv"]),
            fused(values, index, "self_attn", ("q", "k", "v")),
        )
        assert torch.equal(
            values_of(layer.attention.matrices["o"]), fused(values, index, "self_attn", ("o",))
        )
        assert torch.equal(
            values_of(layer.feed_forward.matrices["gate_up"]),
            fused(values, index, "mlp", ("gate", "up")),
        )
        assert torch.equal(
            values_of(layer.feed_forward.matrices["down"]), fused(values, index, "mlp", ("down",))
        )
        name = f"model.layers.{index}"
        assert torch.equal(layer.input_norm, values[f"{name}.input_layernorm.weight"])
        assert torch.equal(
            layer.feed_forward.vectors["down_bias"], values[f"{name}.mlp.down_proj.bias"]
        )


def values_of(weight: BlockMatrix | MatrixStack) -> torch.Tensor:
    """The values of blocks; fails for a plain tensor."""
    if isinstance(weight, MatrixStack):
        return torch.cat([values_of(part) for part in weight.parts])
    return weight.dequantized()


def test_ranks_load_their_parts_of_quantized_weights(make_tiny, tmp_path):
    tiny = make_tiny(hidden_size=96, intermediate_size=64)
    folder, _ = folder_of(tmp_path, tiny, "llama", kind="Q8_0")
    config = load_model_config(folder)
    whole = load_weights(folder, config)
    parts = [load_weights(folder, config, shard=Shard(rank, 2)) for rank in range(2)]
    for index, layer in enumerate(whole.layers):
        of_ranks = [part.layers[index] for part in parts]
        for half, name in (("attention", "o"), ("feed_forward", "down")):
            *some, expected = (getattr(each, half).matrices[name] for each in (*of_ranks, layer))
            assert torch.equal(torch.cat(some, dim=1), expected)
        pairs = [each.feed_forward.matrices["gate_up"].chunk(2) for each in of_ranks]
        gates, ups = zip(*pairs, strict=True)
        assert torch.equal(torch.cat([*gates, *ups]), layer.feed_forward.matrices["gate_up"])


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_each_kind_of_rope_gives_the_same_angles(make_tiny, tmp_path, scaling):
    tiny = make_tiny(rope_parameters={"rope_theta": 500.0, **scaling})
    theirs = load_model_config(tiny.folder)
    extra, others = None, {}
    if scaling["rope_type"] == "llama3":  # llama.cpp keeps what it makes of each frequency
        plain = 1.0 / 500.0 ** (torch.arange(0, theirs.head_dim, 2) / theirs.head_dim)
        scaled = Rope(theirs.rope, theirs.head_dim, "cpu")._inverse_frequencies
        extra = {"rope_freqs.weight": plain / scaled}
    else:
        others = {
            "llama__rope__scaling__type": (scaling["rope_type"], TEXT),
            "llama__rope__scaling__factor": (4.0, F32),
            "llama__rope__scaling__original_context_length": (16, gguf.GGUFValueType.UINT32),
        }
    folder, _ = folder_of(tmp_path, tiny, "llama", extra=extra, **others)
    ours = load_model_config(folder)
    positions = torch.arange(64)
    for mine, other in zip(
        Rope(ours.rope, ours.head_dim, "cpu").cos_sin(positions, torch.float32),
        Rope(theirs.rope, theirs.head_dim, "cpu").cos_sin(positions, torch.float32),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_the_fingerprint_follows_the_content(make_tiny, tmp_path):
    tiny = make_tiny()
    prints = []
    for place, base in (("a", 500.0), ("b", 500.0), ("c", 600.0)):
        file = tmp_path / place / "tiny.gguf"
        file.parent.mkdir()
        theta = {"llama__rope__scaling__attn_factor": (base, F32)}
        write_gguf(file, tiny.folder, "llama", **theta)
        prints.append(model_fingerprint(resolve_model(file)))
    assert prints[0] == prints[1] != prints[2]


def test_messages_call_tensors_as_the_file_does():
    for name in (
        "output_norm.weight",
        "blk.3.attn_q.bias",
        "blk.11.ssm_a",
        "blk.0.ssm_conv1d.weight",
        "blk.2.exp_probs_b.bias",
    ):
        assert llama_cpp_name(hugging_face_name(name)) == name
    assert (
        llama_cpp_name("model.layers.3.mlp.experts.7.up_proj.weight") == "blk.3.ffn_up_exps.weight"
    )
    assert llama_cpp_name("model.layers.3.nothing.weight") == "model.layers.3.nothing.weight"
