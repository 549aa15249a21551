"""Whatever a quantized checkpoint claims, it is loaded or refused by one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from checkpoint.json_keys import JsonKeys
from engine.checkpoint.formats.panel_rows import panel_rows
from engine.checkpoint.formats.quantization import parse_quantization
from engine.checkpoint.formats.quantized_tensors import QuantizedTensors
from engine.checkpoint.stored_tensors import FileTensors
from protocol.errors import ModelLoadError
from tests.effort import some, times
from tests.published_formats import FORMATS, FORMATS_IN_PANELS, compressed

VALUES: list[Any] = [
    None, True, 0, -1, 3, 1 << 70, 0.5, float("nan"), "", "x", "128x", "9" * 400, [], [0, 0],
    "9" * 5000 + "x1", [128, "a"], {}, {"a": {}}, [[]], {"a": None}, {"weights": {"type": []}},
]  # fmt: skip
DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int32,
    torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu,
]  # fmt: skip
SIZES = [0, 1, 2, 3, 8, 12, 24, 64, 96, 192]
EVERY = {**FORMATS, **FORMATS_IN_PANELS}


def refusal_of(step: Callable[[], Any]) -> str | None:
    """The message with which `step` is refused, if it is; any other error is raised."""
    try:
        step()
    except ModelLoadError as error:
        return str(error)
    return None


def assert_one_line(message: str | None, start: str) -> None:
    if message is not None:
        assert message.startswith(start)
        assert "\n" not in message


def paths(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values in `content`."""
    found = [path] if path else []
    if isinstance(content, dict):
        for key, value in content.items():
            found += paths(value, (*path, key))
    return found


@pytest.mark.parametrize("name", some(EVERY, 6))
def test_each_field_of_the_quantization(name):
    config = dict(EVERY[name].config)
    for path in paths(config):
        for value in VALUES:
            changed = json.loads(json.dumps(config))
            at = changed
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            keys = JsonKeys({"quantization_config": changed}, "config.json")
            assert_one_line(refusal_of(lambda keys=keys: parse_quantization(keys)), "config.json")


def test_names_of_groups_are_written_in_one_short_line():
    groups = {"a\nb" * 100: {"weights": {"num_bits": 3}}}
    config = compressed("pack-quantized", {}, config_groups=groups)
    keys = JsonKeys({"quantization_config": config}, "config.json")
    message = refusal_of(lambda: parse_quantization(keys))
    assert message is not None
    assert_one_line(message, "config.json: quantization_config: config_groups: a\\nba")
    assert len(message) < 200


def put_wrong(tensors: dict[str, torch.Tensor], chance: Random) -> None:
    """Leave one out, or give it another type, shape or content."""
    name = chance.choice(sorted(tensors))
    tensor = tensors[name]
    what = chance.randrange(4)
    if what == 0:
        del tensors[name]
    elif what == 1:
        tensors[name] = torch.zeros(tensor.shape).to(chance.choice(DTYPES))
    elif what == 2:
        shape = [chance.choice(SIZES) for _ in range(chance.randrange(4))]
        tensors[name] = torch.zeros(shape).to(tensor.dtype)
    elif tensor.dtype in (torch.int32, torch.int64):
        tensors[name] = torch.full_like(tensor, chance.randint(-(2**31), 2**31 - 1))


@settings(
    max_examples=times(60, 2000),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=st.sampled_from(sorted(EVERY)), chance=st.randoms(use_true_random=False))
def test_wrong_tensors_are_read_or_refused(tmp_path, name, chance):
    form = EVERY[name]
    stored, _ = form.encode(64, 96, torch.Generator().manual_seed(1))
    for _ in range(chance.choice([1, 1, 2])):
        put_wrong(stored, chance)
        if not stored:
            return
    file = tmp_path / "model.safetensors"
    save_file({f"m.{key}": tensor.contiguous() for key, tensor in stored.items()}, file)
    keys = JsonKeys({"quantization_config": dict(form.config)}, "config.json")
    quantization = parse_quantization(keys)

    def read() -> None:
        found = QuantizedTensors(FileTensors(tmp_path), quantization, ["m.weight"])
        for matrix in found.matrices.values():
            assert found.read("m.weight").shape == matrix.shape
            rows = panel_rows(matrix)
            if rows is not None:
                assert sum(piece.num_rows for piece in rows.pieces()) == rows.num_rows

    assert_one_line(refusal_of(read), str(tmp_path))
