"""What a GGUF file's metadata mean, and what is refused by name."""

from __future__ import annotations

import itertools
import json
import math

import gguf
import pytest
from tokenizers import Tokenizer

from checkpoint.gguf.folder import small_files
from checkpoint.gguf.header import read_header
from checkpoint.gguf.vocabulary import tokenizer_files
from checkpoint.json_keys import JsonKeys
from checkpoint.model_source import resolve_model
from protocol.errors import ModelLoadError
from tests.gguf_files import TOKENS
from tests.unit.checkpoint.gguf_models import F32, TEXT, U32, write, write_pieces

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
