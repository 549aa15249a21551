"""GGUF files: which one a name means, what their headers say, and what is said of wrong ones."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import struct
import tempfile
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from bench.tools.gguf_conversion import finish
from checkpoint.gguf.folder import small_files, split_files
from checkpoint.gguf.header import MAX_ELEMENTS, MAX_HEADER_BYTES, read_header
from checkpoint.gguf.vocabulary import tokenizer_files
from checkpoint.json_keys import JsonKeys
from checkpoint.model_source import model_name, resolve_model
from protocol.errors import ConfigError, ModelLoadError
from tests.effort import times
from tests.gguf_files import TOKENS, smollm2, write_metadata

CONFIG = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0},
    "vocab_size": len(TOKENS),
}
U32, F32, TEXT = (
    gguf.GGUFValueType.UINT32,
    gguf.GGUFValueType.FLOAT32,
    gguf.GGUFValueType.STRING,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(file: Path, name: str = "llama", **others) -> Path:
    """A file with the metadata of a small model, and an embedding alone."""
    writer = gguf.GGUFWriter(file, name)
    write_metadata(writer, name, CONFIG, **others)
    writer.add_tensor("token_embd.weight", np.ones((len(TOKENS), 32), np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(32, np.float32))
    finish(writer)
    return file


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


# -- what metadata mean -----------------------------------------------------------------------


def test_a_control_token_that_ends_answers_needs_no_key(tmp_path):
    tokens = [*TOKENS, "<|im_end|>", "<|eot_id|>"]
    kinds = [*[1] * len(TOKENS), 3, 1]  # the last is plain text
    types = (kinds, gguf.GGUFValueType.ARRAY)
    file = write_pieces(tmp_path / "m.gguf", tokens, token_type=types)
    ends = {"eos_token_id": [2, len(TOKENS)]}
    assert small_files([file])["generation_config.json"] == ends


def test_a_text_begins_with_bos_if_the_splitting_or_the_file_says_so(tmp_path):
    flag = gguf.GGUFValueType.BOOL
    for place, (others, begins) in enumerate(
        (({}, False), ({"tokenizer__ggml__add_bos_token": (True, flag)}, True))
    ):
        file = write(tmp_path / f"{place}.gguf", **others)
        around = small_files([file])["tokenizer.json"]["post_processor"]
        assert (around is not None) == begins


def test_yarn_multiplies_its_own_factor_by_that_of_the_file(tmp_path):
    scaling = {"type": ("yarn", TEXT), "factor": (4.0, F32), "attn_factor": (0.5, F32)}
    keys = {f"llama__rope__scaling__{key}": value for key, value in scaling.items()}
    keys["llama__rope__scaling__original_context_length"] = (16, U32)
    rope = small_files([write(tmp_path / "m.gguf", **keys)])["config.json"]["rope_parameters"]
    assert rope["attention_factor"] == pytest.approx(0.5 * (0.1 * math.log(4) + 1))


# -- what is refused by name ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"llama__expert_count": (8, U32)}, "'llama.expert_used_count' is missing"),
        (
            {"llama__expert_count": (8, U32), "llama__expert_shared_count": (1, U32)},
            "mixtures of experts of this kind",
        ),
        ({"llama__rope__scaling__type": ("longrope", TEXT)}, "longrope"),
        ({"tokenizer__ggml__padding_token_id": (9999, U32)}, "padding_token_id"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, others, reason):
    file = write(tmp_path / "m.gguf", **others)
    with pytest.raises(ModelLoadError, match=reason) as error:
        resolve_model(file)
    assert str(file) in str(error.value)


def test_an_unknown_token_that_is_none_is_refused(tmp_path):
    pieces = {"unknown_token_id": (9999, U32)}
    file = write_pieces(tmp_path / "m.gguf", TOKENS, **pieces)
    with pytest.raises(ModelLoadError, match=r"unknown_token_id.*below the number of tokens"):
        resolve_model(file)


def test_tokens_that_are_made_in_too_many_ways_are_refused(tmp_path, monkeypatch):
    """All strings of two letters: a file of 50 MB would take gigabytes."""
    monkeypatch.setattr("checkpoint.vocabularies.bpe.MAX_MERGES", 100)
    few = ["".join(each) for n in range(1, 5) for each in itertools.product("ab", repeat=n)]
    many = [*few, *map("".join, itertools.product("ab", repeat=5))]
    resolve_model(write_pieces(tmp_path / "few.gguf", few))
    with pytest.raises(ModelLoadError, match=r"many\.gguf: .* made in more than 100 ways"):
        resolve_model(write_pieces(tmp_path / "many.gguf", many))


def test_a_special_token_is_in_use_whatever_its_type(tmp_path):
    kinds = [2, 5, *[1] * (len(TOKENS) - 2)]  # <s>, which begins texts, is unused
    types = (kinds, gguf.GGUFValueType.ARRAY)
    file = write_pieces(tmp_path / "m.gguf", TOKENS, token_type=types)
    tokenizer = small_files([file])["tokenizer.json"]
    assert tokenizer["model"]["vocab"]["<s>"] == 1
    assert tokenizer["post_processor"]["special_tokens"]["<s>"]["ids"] == [1]


def write_pieces(file: Path, tokens: list[str], **others) -> Path:
    """A file with a vocabulary of SentencePiece; `others` are more of its keys."""
    pieces = {
        "model": ("llama", TEXT),
        "tokens": (tokens, gguf.GGUFValueType.ARRAY),
        "scores": ([-float(i) for i in range(len(tokens))], gguf.GGUFValueType.ARRAY),
        **others,
    }
    keys = {f"tokenizer__ggml__{key}": value for key, value in pieces.items()}
    return write(file, has_tokens=False, **keys)


def test_windows_of_qwen_are_refused(tmp_path):
    others = {"qwen2__attention__sliding_window": (4, U32)}
    with pytest.raises(ModelLoadError, match="a sliding window of qwen2 is not supported"):
        resolve_model(write(tmp_path / "m.gguf", "qwen2", **others))


def test_another_architecture_is_refused_by_name(tmp_path):
    with pytest.raises(ModelLoadError, match="'mamba' is not supported; supported are "):
        resolve_model(write(tmp_path / "m.gguf", "mamba"))


def test_another_way_of_splitting_text_is_refused_by_name(tmp_path):
    file = write(tmp_path / "m.gguf")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"gpt-2", b"gpt-x"))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre.*gpt-x"):
        resolve_model(file)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("deepseek-v3", ["it", "'s", "  ", "123", "45", " x", "_", "1", "!\n\n"]),
        ("deepseek-v3", ["ok", " ", "\u4f60\u597d\u3042", " f", "(x", ")"]),
        ("deepseek-llm", ["it", "'", "s", "  ", "1", "2", " \u00c9", "n", "\n", "\n"]),
        ("deepseek-llm", ["ok", " ", "\u4f60\u597d", "),", " x", "  "]),
        ("kimi-k2", ["Hello", "\u4f60\u597d", ",", " it's", " ", "123", "45", " XYZ", "\n"]),
        ("kimi-k2", ["a", "\u4f60", "B\u3042", " (", "x", ")", "  "]),
    ],
)
def test_texts_are_split_as_the_family_does(tmp_path, pre, pieces):
    metadata = read_header(write(tmp_path / "m.gguf")).metadata | {"tokenizer.ggml.pre": pre}
    files = tokenizer_files(JsonKeys(metadata, "m.gguf"))
    tokenizer = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    text = "".join(pieces)
    found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == pieces


# -- which file a name means ------------------------------------------------------------------


def test_a_file_and_the_folder_that_holds_it_are_the_same_model(tmp_path):
    (tmp_path / "some").mkdir()
    file = write(tmp_path / "some" / "Tiny.Q8_0.gguf")
    folder = resolve_model(file)
    assert resolve_model(file.parent) == folder
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
    assert (folder / "model-00001-of-00001.gguf").resolve() == file.resolve()
    assert resolve_model(folder) == folder
    assert model_name(str(file)) == "Tiny.Q8_0"


def test_a_changed_file_is_read_again(tmp_path):
    file = write(tmp_path / "m.gguf")
    before = resolve_model(file)
    assert resolve_model(file) == before
    file.unlink()
    write(file, llama__attention__sliding_window=(16, U32))
    after = resolve_model(file)
    assert after != before
    assert json.loads((after / "config.json").read_text())["sliding_window"] == 16


def test_a_folder_with_several_models_needs_a_choice(tmp_path):
    (tmp_path / "models").mkdir()
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf", "mmproj-a.gguf"):
        write(tmp_path / "models" / name)
    with pytest.raises(ModelLoadError, match=r"several models.*a-Q4_0\.gguf, a-Q8_0\.gguf"):
        resolve_model(tmp_path / "models")


def split(folder: Path, count: int = 2) -> list[Path]:
    """A model in two files, as llama.cpp splits them."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=1)
    write_metadata(writer, "llama", CONFIG)
    writer.add_tensor("token_embd.weight", np.ones((len(TOKENS), 32), np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(32, np.float32))
    finish(writer)
    return sorted(folder.glob("m-*-of-*.gguf"))


def test_split_files_count_as_one(tmp_path):
    (tmp_path / "parts").mkdir()
    parts = split(tmp_path / "parts")
    assert [part.name for part in parts] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert split_files(parts[1]) == parts
    folder = resolve_model(parts[0])
    assert folder == resolve_model(parts[1]) == resolve_model(tmp_path / "parts")
    assert len(list(folder.glob("*.gguf"))) == 2
    assert model_name(str(parts[0])) == "m"
    parts[1].unlink()
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00002\.gguf is missing"):
        resolve_model(parts[0])


def test_parts_of_other_models_are_refused(tmp_path):
    (tmp_path / "parts").mkdir()
    parts = split(tmp_path / "parts")
    parts[1].unlink()
    write(parts[1])
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00002\.gguf.*split\.count"):
        resolve_model(parts[0])


def test_parts_in_another_order_are_refused(tmp_path):
    first, second = split(tmp_path)
    other = first.rename(tmp_path / "other")
    second.rename(first)
    other.rename(second)
    with pytest.raises(ModelLoadError, match=r"m-0000\d-of-00002\.gguf.*split\.no.*0, as its name"):
        resolve_model(first)


def test_a_cache_that_others_could_change_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = write(tmp_path / "m.gguf")
    cache = tmp_path / "cache" / "baton" / "gguf"
    assert resolve_model(file).parent == cache
    cache.chmod(0o777)
    assert resolve_model(file).parent == tmp_path / f"baton-gguf-{os.geteuid()}"
    (tmp_path / f"baton-gguf-{os.geteuid()}").chmod(0o777)
    with pytest.raises(ModelLoadError, match="XDG_CACHE_HOME"):
        resolve_model(file)


def test_a_hub_id_may_name_a_quantization(tmp_path):
    asked = []
    (tmp_path / "hub").mkdir()
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", "tiny-IQ4_K_M.gguf"):
        write(tmp_path / "hub" / name)

    def download(
        repo_id: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        asked.append((repo_id, revision, allow_patterns))
        return str(tmp_path / "hub")

    folder = resolve_model("org/tiny-GGUF:q4_k_m", "v1", download)
    assert asked == [("org/tiny-GGUF", "v1", ["*Q4_K_M*.gguf", "*q4_k_m*.gguf"])]
    assert (folder / "model-00001-of-00001.gguf").resolve().name == "tiny-Q4_K_M.gguf"
    with pytest.raises(ModelLoadError, match="no GGUF file whose name ends in Q2_K"):
        resolve_model("org/tiny-GGUF:Q2_K", None, download)
    assert model_name("org/tiny-GGUF:Q4_K_M") == "org/tiny-GGUF:Q4_K_M"


def test_a_local_file_has_no_revision(tmp_path):
    with pytest.raises(ConfigError, match="no meaning for the local file"):
        resolve_model(write(tmp_path / "m.gguf"), "v1")


def test_a_real_file_is_read(tmp_path):
    folder = resolve_model(smollm2())
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["vocab_size"]) == (30, 49152)
    assert config["dtype"] == "bfloat16"
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [2]}
