"""Reading generation_config.json."""

from __future__ import annotations

import pytest

from checkpoint.generation_config import GenerationConfig, load_generation_config
from protocol.errors import ModelLoadError
from tests.unit.engine.checkpoint.configs import write


def test_generation_config(tmp_path):
    assert load_generation_config(tmp_path) == GenerationConfig()
    values = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "transformers_version": "4.51.0",
    }
    write(tmp_path, "generation_config.json", values)
    assert load_generation_config(tmp_path) == GenerationConfig(
        eos_token_ids=(),
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.0,
        repetition_penalty=1.05,
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"temperature": "hot"}, ["'temperature'", '"hot"']),
        ({"top_k": 1.5}, ["'top_k'", "1.5"]),
        ({"do_sample": 1}, ["'do_sample'", "1"]),
        ("[1, 2]", ["JSON object", "[1, 2]"]),
        ("{", ["not valid JSON"]),
    ],
)
def test_errors_of_the_generation_config(tmp_path, value, words):
    write(tmp_path, "generation_config.json", value)
    with pytest.raises(ModelLoadError) as raised:
        load_generation_config(tmp_path)
    for word in [*words, "generation_config.json"]:
        assert word in str(raised.value)
