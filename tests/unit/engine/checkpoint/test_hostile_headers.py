"""Headers of safetensors files that no library writes: each is refused before memory is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.files import read_tensor_entries
from engine.checkpoint.stored_tensors import FileTensors
from protocol.errors import ModelLoadError

DATA = bytes(64)


def tensor(begin: Any, end: Any, shape: Any = (4,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header: object, data: bytes = DATA) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


HOSTILE = {
    "overlap": file_of({"a": tensor(0, 16), "b": tensor(8, 24)}),
    "same bytes": file_of({"a": tensor(0, 16), "b": tensor(0, 16)}),
    "one inside another": file_of({"a": tensor(0, 64, (16,)), "b": tensor(16, 32)}),
    "negative": file_of({"a": tensor(-16, 0)}),
    "backwards": file_of({"a": tensor(16, 0)}),
    "beyond the file": file_of({"a": tensor(48, 80, (8,))}),
    "far beyond": file_of({"a": tensor(0, 2**62)}),
    "above 64 bits": file_of(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,%d]}}' % 10**30),
    "three offsets": file_of({"a": {**tensor(0, 16), "data_offsets": [0, 8, 16]}}),
    "fractions": file_of({"a": tensor(0.5, 16)}),
    "text": file_of({"a": tensor("0", "16")}),
    "negative shape": file_of({"a": tensor(0, 16, (-4,))}),
    "huge shape": file_of({"a": tensor(0, 16, (2**60,))}),
    "many dimensions": file_of({"a": tensor(0, 16, (1,) * 17)}),
    "a shape that overflows": file_of({"a": tensor(0, 16, (2**40,) * 16)}),
    "zero times much": file_of({"a": tensor(0, 16, (0, 2**50))}),
    "a type of another size": file_of({"a": tensor(0, 16, (4,), "F64")}),
    "no type": file_of({"a": tensor(0, 16, (4,), None)}),
    "a type of no format": file_of({"a": tensor(0, 16, (4,), "../../etc/passwd")}),
    "a type of two lines": file_of({"a": tensor(0, 16, (4,), "F32\n")}),
    "fields missing": file_of({"a": {}}),
    "a list": file_of([]),
    "null": file_of(b"null"),
    "deep": file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep metadata": file_of(b'{"__metadata__":' + b"[" * 100_000 + b"}"),
    "no UTF-8": file_of(b'{"\xff\xfe": {}}'),
    "half a surrogate": file_of(b'{"\\ud800": 1}'),
    "not JSON": file_of(b"\x80\x04K\x01."),
    "an empty header": file_of(b""),
    "a header that is longer than the file": (1000).to_bytes(8, "little") + b"{}",
    "a header of 2**63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "a header above the limit": (25_000_001).to_bytes(8, "little") + b"{}",
    "no header": b"\x01",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors") as error:
        FileTensors(tmp_path).read("a")
    assert "\n" not in str(error.value)


def test_of_a_name_that_comes_twice_one_place_counts(tmp_path: Path) -> None:
    """Whichever it is, it lies in the file and has the bytes of its shape."""
    one, other = (json.dumps(tensor(at, at + 16)) for at in (0, 16))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file_of(f'{{"a": {one}, "a": {other}}}'.encode()))
    (entry,) = read_tensor_entries(file).values()
    assert entry.num_bytes == 16


def test_experts_of_many_small_files_are_counted_together(tmp_path: Path, monkeypatch: Any) -> None:
    """Experts without a byte, of which a short header can name thousands."""
    places = {
        f"model.layers.{number}.mlp.experts.down_proj": f"model-{number}.safetensors"
        for number in range(3)
    }
    for experts, name in places.items():
        (tmp_path / name).write_bytes(file_of({experts: tensor(0, 0, (4, 0, 8))}))
    index = {"weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(FileTensors(tmp_path).entries) == 12
    monkeypatch.setattr("engine.checkpoint.files._MAX_ALL_ENTRIES", 11)
    with pytest.raises(ModelLoadError, match="has more than 11 tensors"):
        FileTensors(tmp_path)
