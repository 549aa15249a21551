"""Checkpoints in published formats: their logits are those of the values that they stand for."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.json_keys import JsonKeys
from engine.checkpoint.config import load_model_config
from engine.checkpoint.files import model_fingerprint
from engine.checkpoint.formats.quantization import parse_quantization
from engine.checkpoint.formats.quantized_tensors import QuantizedTensors
from engine.checkpoint.quantized_blocks import Matrix, MatrixStack
from engine.checkpoint.shard import Shard
from engine.checkpoint.stored_tensors import FileTensors
from engine.checkpoint.weights import load_block_weights, load_weights
from tests.effort import some
from tests.latent_models import LATENT_MODELS
from tests.published_formats import (
    FORMATS,
    FORMATS_IN_PANELS,
    change_config,
    change_tensors,
    compressed,
    float4,
    is_linear,
    publish,
)

TOKENS = 12
SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}


@pytest.fixture
def published(make_tiny):
    """`published(name)`: a tiny checkpoint in a format, and transformers' logits of its values."""

    def make(name: str, chosen=is_linear, architecture: str = "LlamaForCausalLM", **options):
        tiny = make_tiny(architecture, **SIZES, **options)
        values = publish(tiny.folder, FORMATS[name], chosen)
        tiny.reference.load_state_dict(values, strict=False)
        return tiny

    return make


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_values(published, paged_model, text, name):
    tiny = published(name)
    model = paged_model(tiny.folder)
    logits = model.step([(text(TOKENS), 0, range(TOKENS))])
    torch.testing.assert_close(logits, tiny.expected_logits(text(TOKENS)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_read_a_piece_at_a_time(tmp_path, monkeypatch, name):
    """As those of every matrix of a real model."""
    monkeypatch.setattr("engine.checkpoint.formats.matrix._NUMBERS_AT_A_TIME", 1)
    form = FORMATS[name]
    stored, values = form.encode(152, 96, torch.Generator().manual_seed(1))
    save_file({f"m.{key}": each for key, each in stored.items()}, tmp_path / "model.safetensors")
    keys = JsonKeys({"quantization_config": dict(form.config)}, "config.json")
    quantization = parse_quantization(keys)
    found = QuantizedTensors(FileTensors(tmp_path), quantization, ["m.weight"])
    assert len(list(found.matrices["m.weight"].pieces())) == 3
    assert torch.equal(found.read("m.weight"), values)


@pytest.mark.parametrize("name", ["fp8 in blocks", "fp8 in blocks that do not divide"])
def test_latent_attention_may_be_quantized(published, paged_model, text, name):
    """Shapes that blocks do not divide, and the matrix that is multiplied from both sides."""

    def is_chosen(tensor: str) -> bool:
        return is_linear(tensor) or tensor.endswith("with_mqa.weight")

    architecture, options = LATENT_MODELS["deepseek v3 dense"]
    tiny = published(name, is_chosen, architecture, **options | {"first_k_dense_replace": 2})
    logits = paged_model(tiny.folder).in_chunks(text(30), 22, range(30))
    torch.testing.assert_close(logits, tiny.expected_logits(text(30)), atol=1e-4, rtol=1e-4)


def is_any_matrix(name: str) -> bool:
    return is_linear(name) or name in ("lm_head.weight", "model.embed_tokens.weight")


@pytest.mark.parametrize("name", some(FORMATS, 3))
@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_and_logits_may_be_quantized(published, paged_model, text, name, is_tied):
    def is_chosen(tensor: str) -> bool:
        return is_any_matrix(tensor) and "7" not in tensor

    options = {"vocab_size": 96, "tie_word_embeddings": is_tied}
    tiny = published(name, is_chosen, **options)
    tokens = [token % 96 for token in text(TOKENS)]
    logits = paged_model(tiny.folder).step([(tokens, 0, range(TOKENS))])
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_biases_norms_and_ignored_layers_stay_plain(published, paged_model, text, architecture):
    tiny = published("packed int4", lambda name: "layers.1.mlp" in name, architecture)
    config = dict(FORMATS["packed int4"].config) | {"ignore": ["re:.*self_attn.*", "lm_head"]}
    change_config(tiny.folder, quantization_config=config)
    logits = paged_model(tiny.folder).step([(text(TOKENS), 0, range(TOKENS))])
    torch.testing.assert_close(logits, tiny.expected_logits(text(TOKENS)), atol=1e-4, rtol=1e-4)


def test_parts_of_a_module_may_lie_in_several_files(published, paged_model, text):
    tiny = published("awq")
    tensors = load_file(tiny.folder / "model.safetensors")
    files = {name: f"model-0000{index % 3}.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        some_tensors = {name: tensors[name] for name, place in files.items() if place == file}
        save_file(some_tensors, tiny.folder / file)
    (tiny.folder / "model.safetensors").unlink()
    index_file = tiny.folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": files}))
    logits = paged_model(tiny.folder).step([(text(TOKENS), 0, range(TOKENS))])
    torch.testing.assert_close(logits, tiny.expected_logits(text(TOKENS)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["fp8 in blocks", "fp8 per tensor"])
def test_one_tensor_of_all_experts_may_have_scales(make_tiny, paged_model, text, name):
    """As transformers 5 writes fp8: scales of blocks, or one of gate and one of up."""
    options = {"num_hidden_layers": 2, "moe_intermediate_size": 32, "num_experts": 4}
    tiny = make_tiny("Qwen3MoeForCausalLM", **options, hidden_size=96, num_experts_per_tok=2)
    form = FORMATS[name]
    publish(tiny.folder, form)
    suffix = "weight_scale_inv" if "blocks" in name else "weight_scale"
    expected = paged_model(tiny.folder).in_chunks(text(TOKENS), 8, range(TOKENS))

    def stack(tensors):
        for layer, parts in product(range(2), (("gate", "up"), ("down",))):
            kind = "_".join(parts)
            at = f"model.layers.{layer}.mlp.experts"
            for each, stacked in (("weight", ""), (suffix, "_scale_inv")):
                found = [
                    torch.cat([tensors.pop(f"{at}.{e}.{p}_proj.{each}") for p in parts])
                    for e in range(4)
                ]
                whole = torch.stack(found)
                whole = whole if whole.dim() == 3 else whole.unsqueeze(-1)
                tensors[f"{at}.{kind}_proj{stacked}"] = whole
            tensors[f"{at}.{kind}_proj_activation_scale"] = torch.ones(4)

    change_tensors(tiny.folder, stack)
    logits = paged_model(tiny.folder).in_chunks(text(TOKENS), 8, range(TOKENS))
    assert torch.equal(logits, expected)


def test_a_status_of_older_writers_is_read(published, paged_model, text):
    tiny = published("packed int4")
    config = dict(FORMATS["packed int4"].config) | {"quantization_status": "frozen"}
    change_config(tiny.folder, quantization_config=config)
    logits = paged_model(tiny.folder).step([(text(TOKENS), 0, range(TOKENS))])
    torch.testing.assert_close(logits, tiny.expected_logits(text(TOKENS)), atol=1e-4, rtol=1e-4)


def test_several_schemes_share_a_checkpoint(published, paged_model, text):
    """A group for attention and another for feed-forward; the older key of the configuration."""
    tiny = published("packed int4", lambda name: "mlp" in name and is_linear(name))
    more = publish(tiny.folder, FORMATS["int8"], lambda name: name.endswith("o_proj.weight"))
    tiny.reference.load_state_dict(more, strict=False)
    groups = [FORMATS[name].config["config_groups"]["group_0"] for name in ("packed int4", "int8")]
    config = compressed("mixed-precision", {}) | {"config_groups": dict(enumerate(groups))}
    change_config(tiny.folder, quantization_config=None, compression_config=config)
    logits = paged_model(tiny.folder).step([(text(TOKENS), 0, range(TOKENS))])
    torch.testing.assert_close(logits, tiny.expected_logits(text(TOKENS)), atol=1e-4, rtol=1e-4)


def test_scales_of_activations_are_named_and_not_used(published, caplog):
    tiny = published("fp8 per tensor")
    at = "model.layers.0.self_attn"

    def add_scales(tensors):
        for name in (f"{at}.q_proj.input_scale", f"{at}.k_scale", f"{at}.v_proj.v_scale"):
            tensors[name] = torch.ones(1)

    change_tensors(tiny.folder, add_scales)
    with caplog.at_level("INFO"):
        load_weights(tiny.folder, load_model_config(tiny.folder))
    text = caplog.text
    assert "14 matrices are fp8, a scale per tensor" in text
    assert "activations are not quantized (the checkpoint's scheme: fp8, static scales)" in text
    assert "WARNING" not in text


@pytest.mark.parametrize("name", some(FORMATS, 4))
def test_ranks_load_their_parts(published, name):
    tiny = published(name)
    config = load_model_config(tiny.folder)
    whole = load_weights(tiny.folder, config)
    parts = [load_weights(tiny.folder, config, shard=Shard(rank, 2)) for rank in range(2)]
    for index, layer in enumerate(whole.layers):
        of_ranks = [part.layers[index] for part in parts]
        for half, matrix in (("attention", "o"), ("feed_forward", "down")):
            *some_inputs, expected = (
                getattr(each, half).matrices[matrix] for each in (*of_ranks, layer)
            )
            assert torch.equal(torch.cat(some_inputs, dim=1), expected)
        pairs = [each.feed_forward.matrices["gate_up"].chunk(2) for each in of_ranks]
        gates, ups = zip(*pairs, strict=True)
        assert torch.equal(torch.cat([*gates, *ups]), layer.feed_forward.matrices["gate_up"])


@pytest.mark.parametrize("name", FORMATS_IN_PANELS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_stay_codes_with_the_same_values(make_tiny, name, is_tied):
    """The embedding, from which rows are looked up, is dequantized."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8}
    tiny = make_tiny(**SIZES | sizes, vocab_size=128, tie_word_embeddings=is_tied)
    values = publish(tiny.folder, FORMATS_IN_PANELS[name], is_any_matrix)
    weights = load_block_weights(tiny.folder, load_model_config(tiny.folder), torch.float32)
    assert torch.equal(weights.embed, values["model.embed_tokens.weight"])
    logits = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    assert torch.equal(of_codes(weights.lm_head), values[logits])
    for index, layer in enumerate(weights.layers):
        halves = layer.attention.matrices | layer.feed_forward.matrices
        for matrix, parts in PARTS.items():
            expected = [values[f"model.layers.{index}.{part}_proj.weight"] for part in parts]
            assert torch.equal(of_codes(halves[matrix]), torch.cat(expected))


PARTS = {
    "qkv": [f"self_attn.{name}" for name in "qkv"],
    "o": ["self_attn.o"],
    "gate_up": ["mlp.gate", "mlp.up"],
    "down": ["mlp.down"],
}


def of_codes(weight: Matrix) -> torch.Tensor:
    """The values of codes; fails for a plain tensor."""
    if isinstance(weight, MatrixStack):
        return torch.cat([of_codes(part) for part in weight.parts])
    return weight.dequantized()


@pytest.mark.parametrize("name", some(FORMATS_IN_PANELS, 4))
def test_experts_have_the_formats_too(make_tiny, paged_model, text, name):
    """Logits are those of a plain checkpoint with the values."""
    options = {"hidden_size": 128, "num_hidden_layers": 2, "moe_intermediate_size": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    tinies = [make_tiny("Qwen3MoeForCausalLM", **options, **experts) for _ in range(2)]
    values = publish(tinies[0].folder, FORMATS_IN_PANELS[name])
    assert any(".experts.3." in each for each in values)
    change_tensors(tinies[1].folder, lambda tensors: tensors.update(values))
    quantized, plain = (
        paged_model(tiny.folder).step([(text(TOKENS), 0, range(TOKENS))]) for tiny in tinies
    )
    assert torch.equal(quantized, plain)


def test_older_checkpoints_of_modelopt_say_so_in_a_file_of_their_own(published, paged_model, text):
    tiny = published("nvfp4 of ModelOpt")
    change_config(tiny.folder, quantization_config=None)
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tiny.folder / "hf_quant_config.json").write_text(json.dumps(own))
    logits = paged_model(tiny.folder).step([(text(TOKENS), 0, range(TOKENS))])
    torch.testing.assert_close(logits, tiny.expected_logits(text(TOKENS)), atol=1e-4, rtol=1e-4)


def in_bf16(tensors):
    for name in tensors:
        if name.endswith(("scales", "weight_scale")):
            tensors[name] = tensors[name].bfloat16()


def without_sense(tensors):
    for name in tensors:
        if name.endswith("g_idx"):
            tensors[name] = torch.zeros_like(tensors[name])


def with_zero_biases(tensors):
    for name in list(tensors):
        if name.endswith("qweight"):
            tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1])


def with_logits(tensors):
    tensors["lm_head.weight"] = torch.zeros(97, 96).to(torch.float8_e4m3fn)
    tensors["lm_head.weight_scale"] = torch.ones(1)


@pytest.mark.parametrize(
    ("name", "change", "options"),
    [
        ("gptq", without_sense, {}),  # as some writers leave it where desc_act is false
        ("gptq", with_zero_biases, {}),  # of layers that have none
        ("fp8 per tensor", with_logits, {"tie_word_embeddings": True}),  # stored although tied
    ],
)
def test_tensors_that_say_nothing_do_no_harm(published, paged_model, text, name, change, options):
    tiny = published(name, **options)
    change_tensors(tiny.folder, change)
    logits = paged_model(tiny.folder).step([(text(TOKENS), 0, range(TOKENS))])
    torch.testing.assert_close(logits, tiny.expected_logits(text(TOKENS)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gptq", "packed int4", "awq"])
def test_scales_may_be_in_bf16(make_tiny, name):
    """Values follow the rounded scales."""
    tiny = make_tiny(**SIZES)
    values = publish(tiny.folder, FORMATS[name])
    change_tensors(tiny.folder, in_bf16)
    config = load_model_config(tiny.folder)
    down = load_weights(tiny.folder, config).layers[0].feed_forward.matrices["down"]
    expected = values["model.layers.0.mlp.down_proj.weight"]
    assert not torch.equal(down, expected)
    torch.testing.assert_close(down, expected, rtol=2**-8, atol=0)


def test_each_expert_has_its_part_of_a_tensor_of_blocks(tmp_path):
    """gpt-oss stores all experts of a layer in one, and the outputs of gate and up by turns."""
    form = float4(32)
    chance = torch.Generator().manual_seed(3)
    stored, values = form.encode(3 * 8, 64, chance)
    at = "model.layers.0.mlp.experts"
    save_file(
        {
            f"{at}.{name}_blocks": stored["weight_packed"].view(3, 8, 2, 16).clone()
            for name in ("down_proj", "gate_up_proj")
        }
        | {
            f"{at}.{name}_scales": stored["weight_scale"].view(3, 8, 2).clone()
            for name in ("down_proj", "gate_up_proj")
        },
        tmp_path / "model.safetensors",
    )
    keys = JsonKeys({"quantization_config": {"quant_method": "mxfp4"}}, "config.json")
    quantization = parse_quantization(keys)
    wanted = [f"{at}.{e}.{name}_proj.weight" for e in range(3) for name in ("gate", "up", "down")]
    found = QuantizedTensors(FileTensors(tmp_path), quantization, wanted)
    for expert, expected in enumerate(values.view(3, 8, 64)):
        gate, up, down = (
            found.read(f"{at}.{expert}.{name}_proj.weight") for name in ("gate", "up", "down")
        )
        assert torch.equal(down, expected)
        assert torch.equal(gate, expected[::2])
        assert torch.equal(up, expected[1::2])
    assert found.entries[wanted[0]].shape == (4, 64)


def test_the_fingerprint_covers_the_format(published):
    tiny = published("fp8 per tensor")
    before = model_fingerprint(tiny.folder)
    change_config(tiny.folder, quantization_config={"quant_method": "fp8"})
    assert model_fingerprint(tiny.folder) != before
