"""The keys of layers with states in a GGUF file's metadata: what a file leaves out, and what does
not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.gguf.hybrids import state_keys
from checkpoint.json_keys import JsonKeys
from protocol.errors import ModelLoadError

SIZES = {
    "group_count": 2,
    "time_step_rank": 6,
    "inner_size": 72,
    "state_size": 8,
    "conv_kernel": 4,
}


def found(recurrent_layers: Any = None, **changes: int) -> dict[str, Any]:
    values = {f"qwen35.ssm.{key}": value for key, value in (SIZES | changes).items()}
    values["qwen35.attention.recurrent_layers"] = recurrent_layers
    return state_keys(JsonKeys(values, "tiny.gguf"), "qwen35", 3, 0.25, [])


def test_every_fourth_layer_has_full_attention_if_the_file_does_not_say() -> None:
    assert found()["full_attention_interval"] == 4


def test_a_file_may_list_the_layers_with_states() -> None:
    """Also those that predict tokens ahead, which are not the model's."""
    keys = found([True, False, True, False])
    assert keys["layer_types"] == ["linear_attention", "full_attention", "linear_attention"]
    assert "full_attention_interval" not in keys
    for wrong in ([True, False], 4):
        with pytest.raises(ModelLoadError, match=r"tiny.gguf: 'qwen35.attention.recurrent_layers'"):
            found(wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_step_rank": 5}, "time_step_rank' must be a multiple of the key heads, 2"),
        ({"inner_size": 71}, "inner_size' must be a multiple of the value heads, 6"),
    ],
)
def test_sizes_that_do_not_fit_together_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ModelLoadError, match=f"tiny.gguf: 'qwen35.ssm.{message}"):
        found(**changes)
