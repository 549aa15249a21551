"""Loading weights: placement, casting, progress, and what is said of a bad checkpoint."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.checkpoint.config import load_model_config
from engine.checkpoint.files import model_fingerprint
from engine.checkpoint.shard import Shard
from engine.checkpoint.weights import load_weights
from protocol.errors import ModelLoadError
from tests.published_formats import change_config

Q = "model.layers.1.self_attn.q_proj.weight"


def load(folder: Path, **options):
    return load_weights(folder, load_model_config(folder), **options)


def rewrite(folder: Path, change) -> None:
    """Applies `change` to the dict of tensors in the single weight file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_tensors_are_fused_and_cast(make_tiny, dtype):
    tiny = make_tiny("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    state = {
        name: t if "norm" in name else t.to(dtype or torch.float32)  # norms stay fp32
        for name, t in tiny.reference.state_dict().items()
    }
    weights = load(tiny.folder, dtype=dtype)
    assert torch.equal(weights.embed, state["model.embed_tokens.weight"])
    assert torch.equal(weights.lm_head, state["lm_head.weight"])
    assert torch.equal(weights.final_norm, state["model.norm.weight"])
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        for kind, qkv, gate_up in (
            ("weight", layer.attention.matrices["qkv"], layer.feed_forward.matrices["gate_up"]),
            (
                "bias",
                layer.attention.vectors["qkv_bias"],
                layer.feed_forward.vectors["gate_up_bias"],
            ),
        ):
            parts = [state[f"{prefix}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
            assert torch.equal(qkv, torch.cat(parts))
            parts = [state[f"{prefix}.mlp.{name}_proj.{kind}"] for name in ("gate", "up")]
            assert torch.equal(gate_up, torch.cat(parts))
        assert torch.equal(
            layer.attention.matrices["o"], state[f"{prefix}.self_attn.o_proj.weight"]
        )
        assert torch.equal(
            layer.attention.vectors["o_bias"], state[f"{prefix}.self_attn.o_proj.bias"]
        )
        assert torch.equal(
            layer.feed_forward.matrices["down"], state[f"{prefix}.mlp.down_proj.weight"]
        )
        assert torch.equal(
            layer.feed_forward.vectors["down_bias"], state[f"{prefix}.mlp.down_proj.bias"]
        )
        assert torch.equal(layer.input_norm, state[f"{prefix}.input_layernorm.weight"])
        assert torch.equal(layer.post_norm, state[f"{prefix}.post_attention_layernorm.weight"])


def test_the_dtype_is_the_checkpoints_own_by_default(make_tiny):
    weights = load(make_tiny(dtype=torch.bfloat16).folder)
    assert weights.layers[0].attention.matrices["qkv"].dtype == torch.bfloat16


def test_tied_embeddings_are_one_tensor(make_tiny):
    tied = load(make_tiny(tie_word_embeddings=True).folder)
    assert tied.lm_head is tied.embed
    untied = load(make_tiny(tie_word_embeddings=False).folder)
    assert untied.lm_head.data_ptr() != untied.embed.data_ptr()


def test_a_tied_checkpoint_may_store_its_embedding_twice(make_tiny, caplog):
    folder = make_tiny(tie_word_embeddings=True).folder
    rewrite(
        folder,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    weights = load(folder)
    assert weights.lm_head is weights.embed
    assert not caplog.records


def test_a_head_that_differs_is_used_although_the_configuration_ties_it(
    make_tiny, paged_model, text, caplog
):
    tiny = make_tiny(tie_word_embeddings=True)
    head = torch.randn(97, 48)
    rewrite(tiny.folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    tokens = text(12)
    logits = paged_model(tiny.folder).in_chunks(tokens, 5, [1, 2, 3])
    theirs = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert "'lm_head.weight' is stored and used for the logits" in caplog.text


def test_shards_load_like_a_single_file(make_tiny, paged_model, text):
    sharded = make_tiny("Qwen3ForCausalLM", shard_bytes=20_000)
    assert len(list(sharded.folder.glob("model-*.safetensors"))) > 3
    tokens = text(12)
    logits = paged_model(sharded.folder).in_chunks(tokens, 5, [1, 2, 3])
    torch.testing.assert_close(logits, sharded.expected_logits(tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_progress_counts_the_stored_bytes(make_tiny, shard_bytes):
    tiny = make_tiny(dtype=torch.bfloat16, shard_bytes=shard_bytes)
    seen: list[tuple[int, int]] = []
    load(tiny.folder, dtype=torch.float32, progress=lambda done, total: seen.append((done, total)))
    stored = sum(2 * parameter.numel() for parameter in tiny.reference.parameters())
    assert len(seen) == len(list(tiny.reference.parameters()))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {stored}
    assert seen[-1][0] == stored


def test_a_missing_tensor_is_named_with_its_shape(make_tiny):
    folder = make_tiny().folder
    rewrite(folder, lambda tensors: tensors.pop(Q))
    with pytest.raises(ModelLoadError, match=r"q_proj\.weight' \[48, 48\] is missing"):
        load(folder)


def test_an_untied_checkpoint_needs_its_head(make_tiny):
    folder = make_tiny().folder
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight.*'tie_word_embeddings' is false"):
        load(folder)


def test_a_wrong_shape_is_named_with_both_shapes(make_tiny):
    folder = make_tiny().folder
    rewrite(folder, lambda tensors: tensors.update({Q: torch.zeros(47, 48)}))
    with pytest.raises(ModelLoadError) as raised:
        load(folder)
    for part in (Q, "[47, 48]", "[48, 48]"):
        assert part in str(raised.value)


def test_integer_weights_are_refused(make_tiny):
    folder = make_tiny().folder
    rewrite(folder, lambda t: t.update({Q: torch.zeros(48, 48, dtype=torch.int8)}))
    with pytest.raises(ModelLoadError, match="stored as I8; supported are"):
        load(folder)


def test_unexpected_tensors_are_logged_and_known_extras_ignored(make_tiny, caplog):
    folder = make_tiny().folder
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "model.layers.0.self_attn.k_b_proj.weight": torch.zeros(4),
        "blk.0.attn_rot_embd.weight": torch.zeros(4),
        "model.layers.0.self_attn.surprise": torch.zeros(4),
    }
    rewrite(folder, lambda tensors: tensors.update(extras))
    with caplog.at_level(logging.WARNING):
        load(folder)
    (record,) = caplog.records
    assert record.args == (str(folder), 1, "model.layers.0.self_attn.surprise")
    for place in (1, 2, 3, 0):  # of a worker's ranks, one tells
        caplog.clear()
        load(folder, shard=Shard(place % 2, 2, place // 2, 2))
        assert len(caplog.records) == (place == 0)


def test_the_configuration_of_another_family_is_refused(make_tiny):
    """Norms of queries and keys would be left out."""
    folder = make_tiny("Qwen3ForCausalLM").folder
    change_config(folder, architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelLoadError, match=r"k_norm\.weight' has no place in LlamaForCausalLM"):
        load(folder)


def test_a_configuration_with_fewer_layers_is_refused(make_tiny):
    folder = make_tiny().folder
    change_config(folder, num_hidden_layers=2)
    message = r"'model\.layers\.2\..*none of the 2 layers .* \('num_hidden_layers'\)"
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


def test_a_layer_that_predicts_tokens_ahead_excuses_no_other_layer(make_tiny):
    folder = make_tiny().folder
    ahead = {"model.layers.3.eh_proj.weight": torch.zeros(4)}
    rewrite(folder, lambda tensors: tensors.update(ahead))
    load(folder)
    change_config(folder, num_hidden_layers=2)
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.2\..*none of the 2 layers"):
        load(folder)


def test_biases_that_the_configuration_lacks_may_be_0(make_tiny):
    """Writers of GPTQ add such biases."""
    folder = make_tiny().folder
    bias = Q.replace("weight", "bias")
    rewrite(folder, lambda tensors: tensors.update({bias: torch.zeros(48)}))
    load(folder)
    rewrite(folder, lambda tensors: tensors.update({bias: torch.ones(48)}))
    with pytest.raises(ModelLoadError, match=r"q_proj\.bias' has no place in LlamaForCausalLM"):
        load(folder)


def test_the_check_comes_before_any_memory_is_taken(make_tiny):
    """A model far too large for this machine fails on its first wrong tensor."""
    folder = make_tiny().folder
    config = dataclasses.replace(load_model_config(folder), vocab_size=2**50)
    with pytest.raises(ModelLoadError, match=r"embed_tokens\.weight"):
        load_weights(folder, config)


def shards(folder: Path, weight_map: dict[str, str]) -> None:
    """Cut the checkpoint into two files: `b` has all tensors, `a` those without a layer, whose
    numbers are 0. `weight_map` changes an index that names `b` for all."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    others = {
        name: torch.zeros_like(each) for name, each in tensors.items() if "layers" not in name
    }
    save_file(others, folder / "a.safetensors")
    save_file(tensors, folder / "b.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "b.safetensors") | weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


NORM = "model.norm.weight"


def test_a_tensor_in_two_files_is_that_of_the_file_which_the_index_names(make_tiny):
    """A shard that another checkpoint lent may have more tensors than the index lists there."""
    folder = make_tiny().folder
    head = load(folder).lm_head.clone()
    shards(folder, {NORM: "a.safetensors"})
    weights = load(folder)
    assert torch.equal(weights.lm_head, head)
    assert not weights.final_norm.any()


def test_an_index_that_names_the_wrong_file_does_no_harm(make_tiny):
    """If only one file has the tensor."""
    folder = make_tiny().folder
    stored = load_file(folder / "model.safetensors")[Q]
    shards(folder, {Q: "a.safetensors", NORM: "a.safetensors"})
    read = load(folder).layers[1].attention.matrices["qkv"][: len(stored)]
    assert torch.equal(read, stored)


def test_a_tensor_that_the_index_does_not_list_is_left_out(make_tiny, caplog):
    folder = make_tiny().folder
    shards(folder, {NORM: "a.safetensors"})
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"][Q]
    file.write_text(json.dumps(index))
    message = r"\(model\.safetensors\.index\.json\): .*q_proj\.weight' \[48, 48\] is missing"
    with caplog.at_level(logging.INFO), pytest.raises(ModelLoadError, match=message):
        load(folder)
    assert f"2 tensors, such as {Q!r}, are left out" in caplog.text


def test_a_tensor_in_two_files_of_which_the_index_names_neither_is_refused(make_tiny):
    folder = make_tiny().folder
    shards(folder, {NORM: "c.safetensors", "lm_head.weight": "a.safetensors"})
    save_file({"other": torch.zeros(1)}, folder / "c.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"b\.safetensors: .*norm\.weight' is in a\.safetensors"
    ):
        load(folder)


def test_the_fingerprint_follows_the_index(make_tiny):
    prints = []
    for place in ("a.safetensors", "b.safetensors"):
        folder = make_tiny().folder
        shards(folder, {NORM: place, "lm_head.weight": "a.safetensors"})
        prints.append(model_fingerprint(folder))
    assert prints[0] != prints[1]


def corrupt_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((5).to_bytes(8, "little") + b"{{{{{")


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def offsets_of_another_shape(folder: Path) -> None:
    """The last tensor of the file claims two bytes less than its shape needs."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    max(tensors, key=lambda entry: entry["data_offsets"][1])["data_offsets"][1] -= 2
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])


def other_format(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def index_without_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def index_of_missing_shard(folder: Path) -> None:
    index = {"weight_map": {Q: "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_outside_the_folder(folder: Path) -> None:
    (folder.parent / "other.safetensors").write_bytes(b"")
    index = {"weight_map": {Q: "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (corrupt_header, ["model.safetensors", "malformed"]),
        (cut_short, ["model.safetensors", "truncated"]),
        (offsets_of_another_shape, ["model.safetensors", "do not hold"]),
        (other_format, ["no weights", "model.safetensors", "not supported"]),
        (empty_file, ["model.safetensors", "truncated"]),
        (index_without_map, ["index.json", "weight_map"]),
        (index_of_missing_shard, ["index.json", "model-00001-of-00002.safetensors"]),
        (index_outside_the_folder, ["index.json", "other.safetensors"]),
    ],
)
def test_damaged_files_are_named(make_tiny, damage, words):
    folder = make_tiny().folder
    damage(folder)
    with pytest.raises(ModelLoadError) as raised:
        load(folder)
    for word in words:
        assert word in str(raised.value)
