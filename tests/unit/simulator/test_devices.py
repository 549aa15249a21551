"""Sizes of models and times of steps against figures that can be computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoint.json_keys import JsonKeys
from protocol.errors import ConfigError, ModelLoadError
from scheduling.batch import Batch, Chunk
from scheduling.step_model import StepModel
from simulator.devices.cards import CARDS, card_named, read_card
from simulator.devices.model_shape import model_shape, shape_of
from simulator.devices.roofline import Precision, Roofline
from simulator.devices.step_times import ChunkWork, chunk_work
from tests.gguf_files import write_gguf
from tests.paths import DEMO_MODEL, HYBRID
from tests.sequences import greedy, sequence_of

DEEPSEEK_V3 = {
    "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "max_position_embeddings": 163840,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Llama-3-8B", 8.03), ("Llama-3-70B", 70.6), ("OPT-13B", 12.9), ("Qwen3-30B-A3B", 30.5)],
)
def test_the_parameters_of_known_models(name: str, billions: float) -> None:
    assert model_shape(name).num_params / 1e9 == pytest.approx(billions, rel=0.01)


def test_latent_attention_and_experts() -> None:
    shape = shape_of(JsonKeys(DEEPSEEK_V3, "config.json"), "v3")
    assert shape.num_params / 1e9 == pytest.approx(671, rel=0.01)
    assert shape.kv_values == 576


def test_a_layer_with_states_attends_to_no_tokens() -> None:
    shape = model_shape(str(HYBRID))
    assert shape.num_layers == 3
    assert (shape.windows, shape.kv_layers, shape.full_layers) == ((), 1, 1)


def test_a_config_file_and_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    assert model_shape(str(path)) == model_shape(str(tmp_path))


def test_a_gguf_file_and_a_folder_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "ours" / "demo-Q8_0.gguf"
    file.parent.mkdir()
    write_gguf(file, DEMO_MODEL, "qwen3", kind="Q8_0")
    wanted = model_shape(str(DEMO_MODEL))
    for name, title in ((file, file.name), (file.parent, "ours")):
        found = model_shape(str(name))
        assert found.name == title
        assert found.num_layers == wanted.num_layers
        assert found.attention_params == wanted.attention_params
        assert found.dense_params == wanted.dense_params
        assert found.kv_values == wanted.kv_values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "hidden_size"),
        ('{"hidden_size": "x"}', "an integer"),
        ('{"hidden_size": 64, "num_attention_heads": 0}', "at least 1"),
        (
            '{"hidden_size": 8, "num_attention_heads": 4, "vocab_size": 9, "num_hidden_layers": 2}',
            "'intermediate_size' is missing",
        ),
    ],
)
def test_a_bad_config_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelLoadError, match=words):
        model_shape(str(path))


def test_a_decode_of_one_row_reads_the_weights_once() -> None:
    card, shape = CARDS["H200"], model_shape("Llama-3-8B")
    roofline = Roofline(card, shape, 1)
    fixed, slope = roofline.decode_line(1)
    read = (shape.num_params - shape.embedding_params) * 2 / (4.8e12 * card.memory_share)
    assert fixed - card.step_s - card.layer_s * 32 == pytest.approx(read, rel=1e-6)
    assert slope == pytest.approx(roofline.kv_bytes_per_token / (4.8e12 * card.memory_share))
    assert roofline.kv_bytes_per_token == 131072


def test_a_long_chunk_is_limited_by_arithmetic() -> None:
    card, shape = CARDS["H100"], model_shape("Llama-3-8B")
    took = Roofline(card, shape, 1).seconds(0, 0, ChunkWork(8192, 0, 0, 0))
    params = shape.num_params - shape.embedding_params - shape.head_params
    assert took == pytest.approx(2 * 8192 * params / (989e12 * card.matrix_share), rel=0.05)


def test_a_step_with_chunks_and_one_without_agree() -> None:
    roofline = Roofline(CARDS["H200"], model_shape("Llama-3-70B"), 4)
    fixed, slope = roofline.decode_line(7)
    assert roofline.seconds(7, 900, ChunkWork()) == fixed + slope * 900


def test_few_tokens_touch_few_experts() -> None:
    roofline = Roofline(CARDS["H200"], model_shape("Qwen3-30B-A3B"), 1)
    one, many = roofline.decode_line(1)[0], roofline.decode_line(256)[0]
    assert many > 3 * one


def test_two_cards_are_faster_than_one_but_not_twice() -> None:
    shape = model_shape("Llama-3-8B")
    one, two = (Roofline(CARDS["A800"], shape, n).decode_line(8)[0] for n in (1, 2))
    assert one / 2 < two < one


def test_kv_takes_the_memory_beside_the_weights() -> None:
    shape = model_shape("Llama-3-8B")
    one = Roofline(CARDS["L40S"], shape, 1)
    room = 48e9 * 0.92 - shape.num_params * 2
    assert one.pool_blocks(64) == int(room / (131072 * 64))
    half = Roofline(CARDS["L40S"], shape, 1, Precision(2.0, 1.0))
    assert half.pool_blocks(64) == pytest.approx(2 * one.pool_blocks(64), abs=1)


def test_a_model_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ConfigError, match="raise --tp"):
        Roofline(CARDS["H100"], model_shape("Llama-3-70B"), 1).pool_blocks(64)


def test_cards_are_found_in_any_case() -> None:
    assert card_named("h200") is CARDS["H200"]
    with pytest.raises(ConfigError, match="use one of H100, H200"):
        card_named("B300")


def test_a_card_file_replaces_numbers(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text('{"like": "H100", "step_s": 0.001, "memory_share": 0.7}')
    card, steps = read_card(path)
    assert steps is None
    assert (card.name, card.step_s, card.memory_share) == ("ours", 0.001, 0.7)
    assert card.flops == CARDS["H100"].flops
    path.write_text('{"like": "H100", "stepp_s": 0.001}')
    with pytest.raises(ConfigError, match="'stepp_s' is not a property"):
        read_card(path)


def test_a_card_file_describes_a_newer_card(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text('{"like": "H200", "name": "H900", "flops": 2.25e15, "memory_bytes": 1.92e11}')
    card, _ = read_card(path)
    assert (card.name, card.flops, card.memory_bytes) == ("H900", 2.25e15, 1.92e11)
    assert card.memory_bytes_per_s == CARDS["H200"].memory_bytes_per_s


def test_measured_steps_are_those_of_the_step_model(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    coefficients = {"fixed_us": 900, "per_token_us": 40, "per_attended_us": 0.002}
    path.write_text(json.dumps({"like": "L40S", "steps": coefficients}))
    _, steps = read_card(path)
    assert steps is not None
    model = StepModel(900e-6, 40e-6, 0.002e-6)
    decoding = [sequence_of(range(n), greedy(5), 16) for n in (33, 70)]
    for each in decoding:
        each.num_computed = each.num_tokens - 1
    prompt = sequence_of(range(64), greedy(5), 16)
    batch = Batch(decoding, [Chunk(prompt, 16, 32, False)])
    took = steps.seconds(2, 103, chunk_work(batch))
    assert took == pytest.approx(model.predict(batch.cost))
    path.write_text(json.dumps({"like": "L40S", "steps": {"fixed_us": 900}}))
    with pytest.raises(ModelLoadError, match="'per_token_us' is missing"):
        read_card(path)


TABLES = {
    "decodes_us": [[1, 1000], [5, 1800]],
    "chunks_us": [[16, 2000], [32, 3000]],
    "per_context_us": 0.5,
    "per_pair_us": 0.25,
}


def test_timed_steps_are_read_from_tables(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"like": "L40S", "steps": TABLES}))
    _, steps = read_card(path)
    assert steps is not None
    assert steps.decode_line(3) == pytest.approx((1400e-6, 0.5e-6))
    assert steps.decode_line(9)[0] == pytest.approx(2600e-6), "the last line goes on"
    alone = steps.seconds(0, 0, ChunkWork(24, 300, 24))
    assert alone == pytest.approx(2500e-6 + 300 * 0.25e-6)
    both = steps.seconds(4, 100, ChunkWork(24, 300, 24))
    outputs = 1600e-6 - 1250e-6  # four decodes instead of a chunk of four
    assert both == pytest.approx(2750e-6 + outputs + 100 * 0.5e-6 + 300 * 0.25e-6)


@pytest.mark.parametrize("table", [[], [[1]], [[2, 5], [1, 5]], [[0, 5]], [["1", 5]], 3])
def test_a_table_that_is_none_is_refused(tmp_path: Path, table: object) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"like": "L40S", "steps": {**TABLES, "chunks_us": table}}))
    with pytest.raises(ModelLoadError, match="'chunks_us' must be a list of pairs"):
        read_card(path)
