"""Headers of GGUF files: what they say, and what is said of wrong ones."""

from __future__ import annotations

import json
import os
import random
import struct
import time
import tracemalloc

import gguf
import pytest

from checkpoint.gguf.folder import small_files
from checkpoint.gguf.header import MAX_ELEMENTS, MAX_HEADER_BYTES, read_header
from checkpoint.model_source import resolve_model
from protocol.errors import ModelLoadError
from tests.effort import times
from tests.unit.checkpoint.gguf_models import write

# -- headers --------------------------------------------------------------------------------


def test_the_header_is_what_the_gguf_package_reads(tmp_path):
    others = {
        "a__flag": (True, gguf.GGUFValueType.BOOL),
        "a__small": (-3, gguf.GGUFValueType.INT8),
        "a__large": (2**60, gguf.GGUFValueType.UINT64),
        "a__real": (1.5, gguf.GGUFValueType.FLOAT64),
    }
    file = write(tmp_path / "m.gguf", **others)
    header, reader = read_header(file), gguf.GGUFReader(file)
    theirs = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    assert header.metadata == theirs
    assert header.metadata["a.large"] == 2**60
    for ours, tensor in zip(header.tensors, reader.tensors, strict=True):
        assert (ours.name, ours.begin) == (tensor.name, tensor.data_offset)
        assert ours.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert ours.end - ours.begin == tensor.n_bytes


def header_text(*parts: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<I", version) + b"".join(parts)


def counts(tensors: int, keys: int) -> bytes:
    return struct.pack("<QQ", tensors, keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(sizes: list[int], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(b"t") + shape + struct.pack("<IQ", kind, offset)


WRONG = {
    "magic": (b"GGML" + b"\0" * 60, "is not a GGUF file"),
    "empty": (b"", "is not a GGUF file"),
    "version": (header_text(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + b"\0" * 60, "big-endian"),
    "cut in version": (b"GGUF\3", "cut short"),
    "many tensors": (header_text(counts(2**63, 0)), "number of tensors"),
    "many keys": (header_text(counts(0, 2**63)), "number of metadata keys"),
    "long string": (header_text(counts(0, 1), struct.pack("<Q", 2**62), b"x" * 64), "cut short"),
    "key not UTF-8": (header_text(counts(0, 1), text(b"\xff\xfe"), b"\0" * 64), "not valid UTF-8"),
    "key twice": (
        header_text(counts(0, 2), *[text(b"k") + struct.pack("<IB", 0, 1)] * 2),
        "is there twice",
    ),
    "kind of value": (header_text(counts(0, 1), text(b"k"), struct.pack("<I", 77)), "type 77"),
    "huge array": (
        header_text(counts(0, 1), text(b"k"), struct.pack("<IIQ", 9, 4, 2**61), b"\0" * 64),
        "number of elements",
    ),
    "nested array": (
        header_text(counts(0, 1), text(b"k"), struct.pack("<IIQ", 9, 9, 1), b"\0" * 64),
        "array of arrays",
    ),
    "alignment": (
        header_text(counts(0, 1), text(b"general.alignment"), struct.pack("<II", 4, 33)),
        "power of two",
    ),
    "dimensions": (
        header_text(counts(1, 0), text(b"t"), struct.pack("<I", 9), b"\0" * 99),
        "9 dimensions",
    ),
    "size": (header_text(counts(1, 0), tensor([2**50], 0, 0), b"\0" * 99), "impossible shape"),
    "kind": (header_text(counts(1, 0), tensor([256], 10, 0), b"\0" * 99), "Q2_K"),
    "unknown kind": (header_text(counts(1, 0), tensor([256], 9999, 0), b"\0" * 99), "type 9999"),
    "part of a block": (header_text(counts(1, 0), tensor([48], 8, 0), b"\0" * 99), "whole blocks"),
    "outside": (header_text(counts(1, 0), tensor([4], 0, 2**40), b"\0" * 99), "outside the file"),
    "unaligned": (header_text(counts(1, 0), tensor([4], 0, 4), b"\0" * 99), "multiple of 32"),
    "shared": (
        header_text(counts(2, 0), tensor([64], 0, 0), tensor([64], 0, 32)[:8] + b"u"
                    + tensor([64], 0, 32)[9:], b"\0" * 999),
        "share bytes",
    ),
    "tensor twice": (
        header_text(counts(2, 0), tensor([4], 0, 0), tensor([4], 0, 32), b"\0" * 99),
        "there twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_header_is_named(tmp_path, what):
    content, reason = WRONG[what]
    file = tmp_path / "wrong.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=reason) as error:
        resolve_model(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    content = write(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    size = read_header(tmp_path / "whole.gguf").size
    for length in (*range(size + 1), *random.Random(0).sample(range(size, len(content)), 20)):
        cut.write_bytes(content[:length])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            small_files([cut])


def test_any_change_of_a_header_is_an_error_or_harmless(tmp_path):
    content = write(tmp_path / "whole.gguf").read_bytes()
    size, chance = read_header(tmp_path / "whole.gguf").size, random.Random(1)
    file = tmp_path / "changed.gguf"
    errors = []
    for _ in range(times(120, 10_000)):
        changed = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(size)
            kind = chance.randrange(3)
            if kind == 0:
                changed[place] = chance.randrange(256)
            elif kind == 1:
                number = chance.choice([0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1])
                changed[place : place + 8] = struct.pack("<Q", number)
            else:
                del changed[place : place + chance.randint(1, 16)]
        file.write_bytes(changed)
        try:
            for name, value in small_files([file]).items():
                assert json.loads(json.dumps(value)) == value or name == "tokenizer.json"
        except ModelLoadError as error:
            errors.append(str(error))
    assert len(errors) > times(120, 10_000) / 4
    assert all("changed.gguf" in error and "\n" not in error for error in errors)


def test_reading_takes_bounded_memory(tmp_path):
    """A string's length and an array's count may claim more than the file holds."""
    file = tmp_path / "greedy.gguf"
    array = struct.pack("<IIQ", 9, 0, 2**22)
    file.write_bytes(header_text(counts(0, 1), text(b"k"), array, b"\0" * (2**22 - 1)))
    began = time.process_time()
    tracemalloc.start()
    with pytest.raises(ModelLoadError):
        read_header(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert time.process_time() - began < 60


def test_a_header_has_limits_even_if_the_file_is_larger(tmp_path):
    file = tmp_path / "large.gguf"
    value = struct.pack("<IQ", 8, MAX_HEADER_BYTES)
    file.write_bytes(header_text(counts(0, 1), text(b"k"), value))
    os.truncate(file, 2 * MAX_HEADER_BYTES)  # a sparse file
    with pytest.raises(ModelLoadError, match="the header is longer than"):
        read_header(file)
    half = MAX_ELEMENTS // 2 + 1
    arrays = [text(key) + struct.pack("<IIQ", 9, 0, half) + bytes(half) for key in (b"a", b"b")]
    file.write_bytes(header_text(counts(0, 2), *arrays))
    with pytest.raises(ModelLoadError, match="number of elements of 'b'"):
        read_header(file)
