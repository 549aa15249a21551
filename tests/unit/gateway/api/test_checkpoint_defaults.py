"""What a checkpoint says about sampling."""

from __future__ import annotations

import json

import pytest

from gateway.api.checkpoint_defaults import SamplingDefaults, load_sampling_defaults
from protocol.errors import ModelLoadError


def write(path, generation=None, config=None):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (path / name).write_text(json.dumps(content))


def test_without_files_nothing_is_assumed(tmp_path):
    assert load_sampling_defaults(tmp_path, None) == SamplingDefaults()


def test_the_checkpoint_s_values_are_taken(tmp_path):
    write(tmp_path, {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1})
    found = load_sampling_defaults(tmp_path, None)
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.9, 20)
    assert (found.min_p, found.repetition_penalty) == (0.0, 1.1)


def test_lengths_for_transformers_own_calls_limit_nobody(tmp_path):
    write(tmp_path, {"max_new_tokens": 40, "max_length": 20, "min_new_tokens": 5})
    assert load_sampling_defaults(tmp_path, None) == SamplingDefaults()


@pytest.mark.parametrize("top_k", [-1, 0])
def test_all_tokens_may_be_chosen_from(tmp_path, top_k):
    write(tmp_path, {"top_k": top_k})
    assert load_sampling_defaults(tmp_path, None).top_k == 0


def test_ends_of_text_come_from_every_file(tmp_path):
    write(tmp_path, {"eos_token_id": [7, 3]}, {"eos_token_id": 5})
    assert load_sampling_defaults(tmp_path, eos_id=3).end_token_ids == (3, 5, 7)


def test_a_language_model_that_is_one_part_of_several_has_its_own_end(tmp_path):
    text = {"eos_token_id": 5}
    write(tmp_path, config={"model_type": "qwen3_5", "text_config": text})
    assert load_sampling_defaults(tmp_path, None).end_token_ids == (5,)
    write(tmp_path, config={"eos_token_id": [6], "text_config": text})
    assert load_sampling_defaults(tmp_path, None).end_token_ids == (6,)


@pytest.mark.parametrize(
    "generation",
    [{"temperature": "hot"}, {"top_p": True}, {"eos_token_id": "x"}, {"eos_token_id": [1, None]}],
)
def test_a_malformed_value_stops_the_start(tmp_path, generation):
    write(tmp_path, generation)
    with pytest.raises(ModelLoadError, match=next(iter(generation))):
        load_sampling_defaults(tmp_path, None)
