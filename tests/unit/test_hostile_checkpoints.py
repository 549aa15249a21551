"""Damage of every kind in every file of a checkpoint ends in one error, on one line."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.generation_config import load_generation_config
from checkpoint.json_keys import JsonKeys, read_json_object
from checkpoint.regular_file import MAX_SMALL_BYTES, read_small
from checkpoint.trial import trouble_of
from engine.checkpoint.config import load_model_config
from engine.checkpoint.files import model_fingerprint, read_tensor_entries, weight_files
from engine.checkpoint.rope_config import parse_rope
from engine.checkpoint.weights import load_weights
from engine.layers.rope import Rope
from gateway.api.checkpoint_defaults import load_sampling_defaults
from gateway.text.checkpoint_texts import load_chat_templates, load_tokenizer_config
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ModelLoadError
from tests.effort import in_turn, times
from tests.paths import DEMO_MODEL

SMALL = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
VALUES: list[Any] = [
    None, True, -1, 0, 1, 0.5, 3, 2**31, 2**63, -(10**400), 10**400, 1e308, -1e308, float("nan"),
    float("inf"), "", "x", "\ud800", "a\nb\x1b[2J", "x" * 1000, [], [None], [[]], {}, {"a": {}},
    [2**40], ["full_attention"] * 4, {"rope_type": "yarn"}, {"0": {}}, {"x": 1},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model, whose files a test damages."""
    found = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, found)
    return found


def read_as_worker(folder: Path) -> None:
    config = load_model_config(folder)
    model_fingerprint(folder)
    Rope(config.rope, config.head_dim, "cpu").tables(8)
    load_weights(folder, config)


def read_as_router(folder: Path) -> None:
    load_chat_templates(folder)
    tokenizer = Tokenizer(folder)
    tokenizer.encode("Hello", add_special_tokens=True)
    load_sampling_defaults(folder, tokenizer.eos_id)
    tokenizer.close()


def error_of(step: Callable[[Path], Any], folder: Path) -> str:
    """The message of the error that the step must raise; it names a file of the checkpoint."""
    with pytest.raises(ModelLoadError) as raised:
        step(folder)
    assert str(folder) in str(raised.value)
    line = trouble_of(folder, lambda: step(folder))
    assert line is not None
    assert line.isprintable()
    return line


def fields(content: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all fields of an object, of its objects too."""
    for key, value in content.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from fields(value, (*path, key))


def with_field(content: Any, path: tuple, value: Any) -> Any:
    changed = copy.deepcopy(content)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def refusal_of(step: Callable[[], Any]) -> str | None:
    try:
        step()
    except ModelLoadError as error:
        return str(error)
    return None


def try_each_field(file: Path, extra: dict[str, Any], step: Callable[[], Any]) -> int:
    """Put each of `VALUES` into each field; how many were refused. Any other error is raised."""
    content = json.loads(file.read_text()) | extra
    num_refused = 0
    for path in fields(content):
        for value in VALUES:
            file.write_text(json.dumps(with_field(content, path, value)))
            message = refusal_of(step)
            if message is not None:
                num_refused += 1
                assert str(file) in message, f"{path}: {value!r}: {message}"
    return num_refused


YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def test_each_field_of_the_configuration(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    extra = {"eos_token_id": 5}
    file = folder / "config.json"
    assert try_each_field(file, extra, lambda: load_model_config(folder)) > 200


@pytest.mark.parametrize("table", [YARN, LLAMA3], ids=["yarn", "llama3"])
def test_each_field_of_the_rotary_embedding(tmp_path: Path, table: dict[str, Any]) -> None:
    """Whatever is accepted can be computed."""
    file = tmp_path / "rope.json"
    file.write_text(json.dumps({"rope_scaling": table, "original_max_position_embeddings": None}))

    def step() -> None:
        config = parse_rope(JsonKeys(read_json_object(file), str(file)), 128)
        Rope(config, 32, "cpu").tables(8)

    assert try_each_field(file, {}, step) > 50


def test_sizes_that_do_not_fit_the_weights_are_refused_before_memory_is_taken(
    folder: Path,
) -> None:
    file = folder / "config.json"
    content = json.loads(file.read_text())
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"):
        for value in (2, 4096, 1 << 20):
            file.write_text(json.dumps(content | {key: value, "eos_token_id": 1}))
            (folder / "generation_config.json").write_text("{}")
            line = trouble_of(file, lambda: load_weights(folder, load_model_config(folder)))
            assert line is not None, f"{key}: {value}"
            assert str(folder) in line


def test_each_field_of_the_other_small_files(folder: Path) -> None:
    extra = {"temperature": 1.0, "top_p": 1.0, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.0}
    file = folder / "generation_config.json"
    assert try_each_field(file, extra, lambda: load_generation_config(folder)) > 100
    token = {"content": "<x>", "special": True, "lstrip": False}
    extra = {"add_bos_token": True, "added_tokens_decoder": {"2048": token}, "chat_template": "x"}
    step = lambda: (load_tokenizer_config(folder), load_chat_templates(folder))  # noqa: E731
    assert try_each_field(folder / "tokenizer_config.json", extra, step) > 100


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replaced_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def linked_to(target: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return damage


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "JSON|tokenizer|safetensors"),
    "folder": (replaced_by_folder, "is a folder"),
    "pipe": (fifo, "is a pipe"),
    "device": (linked_to("/dev/zero"), "is a device|link out of its folder"),
    "dangling": (linked_to("nowhere"), "missing"),
    "loop": (lambda path: linked_to(path.name)(path), "cannot read"),
    "huge": (sparse, "longer than|safetensors"),
    "no utf-8": (lambda path: path.write_bytes(b"\xff\xfe{}"), "UTF-8|tokenizer|safetensors"),
    "no json": (lambda path: path.write_text("{'a': 1}"), "JSON|tokenizer|safetensors"),
    "list": (lambda path: path.write_text("[]"), "object|tokenizer|safetensors"),
    "deep list": (lambda path: path.write_text("[" * 100_000), "deep|tokenizer|safetensors"),
    "deep object": (lambda path: path.write_text('{"a":' * 100_000), "deep|tokenizer|safetensors"),
    "long number": (lambda path: path.write_text('{"a": 1' + "0" * 9999 + "}"), "JSON|tok|safe"),
}


@pytest.mark.parametrize(("name", "damage"), in_turn([*SMALL, WEIGHTS], DAMAGES))
def test_a_file_of_another_kind(folder: Path, name: str, damage: str) -> None:
    spoil, reason = DAMAGES[damage]
    spoil(folder / name)
    is_worker = name in ("config.json", "generation_config.json", WEIGHTS)
    message = error_of(read_as_worker if is_worker else read_as_router, folder)
    assert re.search(reason, message), message
    if name == "config.json":
        assert name in error_of(read_as_router, folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    is_router = name == "tokenizer.json"
    assert name in error_of(read_as_router if is_router else read_as_worker, folder)


def test_a_small_file_may_be_a_link_within_its_folder_or_the_hub_s_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("hub")
    (tmp_path / "secret").write_text("secret")
    (snapshot / "hub").symlink_to("../../blobs/1")
    (snapshot / "inner").symlink_to("hub")
    (snapshot / "outer").symlink_to("../../../secret")
    assert read_small(snapshot / "hub") == read_small(snapshot / "inner") == b"hub"
    with pytest.raises(ModelLoadError, match="link out of its folder"):
        read_small(snapshot / "outer")


def test_a_small_file_may_have_the_limit_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    assert len(read_small(file, 100)) == 100
    with pytest.raises(ModelLoadError, match="longer than 99 bytes"):
        read_small(file, 99)
    assert MAX_SMALL_BYTES == 1 << 24


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\0.safetensors",
     "missing.safetensors", "config.json", 5, None, ["x"], "\ud800.safetensors", "a\nb"],
)  # fmt: skip
def test_an_index_that_names_something_else_than_a_file_beside_it(folder: Path, name: Any) -> None:
    (folder.parent / "outside.safetensors").write_bytes((folder / WEIGHTS).read_bytes())
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert INDEX in error_of(weight_files, folder)


@pytest.mark.parametrize("content", ['{"weight_map": []}', "{}", '{"weight_map": {}}', "[]"])
def test_an_index_of_another_form(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    assert INDEX in error_of(weight_files, folder)


def test_tensors_that_no_shard_has_are_named(folder: Path) -> None:
    header = json.dumps({}).encode()
    (folder / "one.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "one.safetensors"}}))
    assert "is missing" in error_of(read_as_worker, folder)


def weights(header: bytes, size: int | None = None, data: bytes = b"\0" * 64) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header + data


def tensor(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes
    return json.dumps({"t": entry}).encode()


@pytest.mark.parametrize(
    "content",
    [
        weights(tensor(), size=10**6),
        weights(tensor(), size=2**63),
        weights(tensor(), size=2**64 - 1),
        weights(tensor(), size=0),
        b"\x08",
        weights(tensor(data_offsets=[0, 2**60])),
        weights(tensor(data_offsets=[-16, 0])),
        weights(tensor(data_offsets=[16, 0])),
        weights(tensor(data_offsets=[0, 65])),
        weights(tensor(data_offsets=[0])),
        weights(tensor(data_offsets=[0.5, 16])),
        weights(tensor(data_offsets="ab")),
        weights(tensor(shape=[-4])),
        weights(tensor(shape=[2**62, 4])),
        weights(tensor(shape="4")),
        weights(tensor(shape=[[4]])),
        weights(tensor(shape=[1] * 100)),
        weights(tensor(dtype=4)),
        weights(b'{"t": 1}'),
        weights(b"[]"),
        weights(b"{" * 100_000),
        weights(b'{"\xff": 1}'),
        weights(
            json.dumps(
                {
                    "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                    "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
                }
            ).encode()
        ),
    ],
)
def test_a_header_that_lies(folder: Path, content: bytes) -> None:
    file = folder / WEIGHTS
    file.write_bytes(content)
    assert WEIGHTS in error_of(lambda folder: read_tensor_entries(file), folder)


@given(st.data())
@settings(max_examples=times(30, 60))
def test_any_change_of_the_header_is_an_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray((DEMO_MODEL / WEIGHTS).read_bytes()[:3000])
    size = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("weights")
    file = folder / WEIGHTS
    file.write_bytes(content + b"\0" * (size - 2000))
    line = trouble_of(file, lambda: read_tensor_entries(file))
    assert line is None or (line.isprintable() and str(file) in line and "Error" not in line)


def test_a_dtype_that_does_not_fit_the_size_is_refused(folder: Path) -> None:
    file = folder / WEIGHTS
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"BF16"', b'"F64" ', 1))
    assert WEIGHTS in error_of(read_as_worker, folder)


def test_weights_beyond_the_memory_are_refused_before_they_are_read(folder: Path) -> None:
    """A sparse file: 1.7 TB that take no space on the disk."""
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    width, layers = 1 << 18, config["num_hidden_layers"]
    config |= {"intermediate_size": width, "hidden_size": width, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    q, kv = 6 * 32, 2 * 32
    shapes = {"model.embed_tokens.weight": [2048, width], "model.norm.weight": [width]}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}input_layernorm.weight": [width]}
        shapes |= {f"{at}post_attention_layernorm.weight": [width]}
        shapes |= {f"{at}self_attn.{n}_norm.weight": [32] for n in "qk"}
        shapes |= {
            f"{at}self_attn.{n}_proj.weight": [r, width]
            for n, r in zip("qkv", (q, kv, kv), strict=True)
        }
        shapes |= {f"{at}self_attn.o_proj.weight": [width, q]}
        shapes |= {f"{at}mlp.{n}_proj.weight": [width, width] for n in ("gate", "up", "down")}
    end, header = 0, {}
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    message = error_of(lambda folder: load_weights(folder, load_model_config(folder)), folder)
    assert "GB available" in message
