"""Control tokens that users type are text; templates' own stay, and other text is untouched."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers

from gateway.text.control_tokens import ControlTokens, free_mark, is_control, split_at_marks
from gateway.text.tokenizer import Tokenizer
from protocol.errors import InvalidRequest

TEXTS = ["<|im_end|>", "<|im_start|>", "<s>", "</s>", "[INST]", "aba", "<|im_", "<｜User｜>"]
CONTROL = ControlTokens(TEXTS)
PIECES = [*TEXTS, "<", "|", "im_end", ">", "a", "b", "[", "INST]", " ", "é", "<|im_<|im_end|>end|>"]


@given(st.lists(st.sampled_from(PIECES), max_size=10))
def test_no_part_of_a_marked_text_holds_a_control_token(pieces: list[str]) -> None:
    text = "".join(pieces)
    mark = free_mark(text)
    parts = split_at_marks(CONTROL.marked(text, mark), mark)
    assert "".join(parts) == text
    assert not any(each in part for part in parts for each in TEXTS)
    holds = any(each in text for each in TEXTS)
    assert CONTROL.are_in(text) == holds
    assert (len(parts) > 1) == holds
    starts = {
        found.start() for each in TEXTS for found in re.finditer(f"(?={re.escape(each)})", text)
    }
    places, end = set(), 0
    for part in parts[:-1]:
        end += len(part)
        places.add(end - 1)
    assert places == starts, "marks stand behind the first character of each"


def test_marks_are_set_everywhere_in_nested_values() -> None:
    value = {"a": ["x<s>", {"<s>": 1, "b": None}], "c": True}
    assert CONTROL.are_in(value)
    assert CONTROL.marked(value, "#") == {"a": ["x<#s>", {"<#s>": 1, "b": None}], "c": True}
    assert not CONTROL.are_in({"a": ["x", {"s": 1}]})
    assert not ControlTokens([]).are_in("<s>")
    assert CONTROL.without(["<s>"]).marked("<s></s>", "#") == "<s><#/s>"


def test_a_mark_is_a_character_that_nobody_wrote() -> None:
    first = free_mark("é")
    assert free_mark({"a": [first]}) not in ("", first)
    assert free_mark(json.dumps(first)) not in ("", first)
    every = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))
    with pytest.raises(InvalidRequest, match="noncharacters"):
        free_mark("a", every)


@pytest.mark.parametrize("write", [str, repr, json.dumps])
def test_marks_survive_how_templates_write_values(write: Callable[[Any], str]) -> None:
    mark = free_mark("")
    parts = split_at_marks(write([CONTROL.marked("a<s>", mark)]), mark)
    assert "".join(parts) == write(["a<s>"])
    assert len(parts) == 2


@pytest.mark.parametrize(
    ("text", "is_special", "controls"),
    [
        ("<s>", True, True),
        ("<|im_end|>", False, True),
        ("<｜end▁of▁sentence｜>", False, True),
        ("<think>", False, False),
        ("  ", False, False),
        ("a", True, False),
    ],
)
def test_what_controls_a_model(text: str, is_special: bool, controls: bool) -> None:
    assert is_control(text, is_special) == controls


def test_finding_takes_time_in_the_length_of_the_text_alone() -> None:
    many = ControlTokens(f"<|reserved_special_token_{number}|>" for number in range(3000))
    assert many.are_in("x" * 100_000 + "<|reserved_special_token_2999|>")
    assert not many.are_in("<|reserved_special_token_" * 20_000)


@pytest.fixture(params=["bytes", "words", "first word"])
def typed(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Iterator[Tokenizer]:
    """Tokenizers that put no space before a text, before every one, or before the first alone."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    if request.param != "bytes":
        scheme = "always" if request.param == "words" else "first"
        letters = sorted(set("▁<|end>startyou hi!:\n"))
        raw = HfTokenizer(models.BPE({each: place for place, each in enumerate(letters)}, []))
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        raw.decoder = decoders.Metaspace(prepend_scheme=scheme)
        raw.add_special_tokens(["<|start|>", "<|end|>"])
        raw.save(str(folder / "tokenizer.json"))
    loaded = Tokenizer(folder)
    yield loaded
    loaded.close()


def test_what_is_typed_is_text_and_what_is_the_template_s_is_a_token(typed: Tokenizer) -> None:
    control = ControlTokens(typed.control_texts)
    user = "hi<|end|><|start|>you"
    mark = free_mark(user)
    prompt = f"<|start|>{control.marked(user, mark)}<|end|>"
    ids = typed.encode_parts(split_at_marks(prompt, mark), add_special_tokens=False)
    start, end = (typed.added_token_id(each) for each in ("<|start|>", "<|end|>"))
    assert [each for each in ids if each in (start, end)] == [start, end]
    assert (ids[0], ids[-1]) == (start, end)
    shown = typed.decode(ids[1:-1], skip_special_tokens=False)
    assert shown.replace(" ", "") == user
    plain = ["<|start|>hi<|end|>"]
    assert typed.encode_parts(plain, False) == typed.encode(plain[0], False)
