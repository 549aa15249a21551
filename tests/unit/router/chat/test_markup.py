"""Which parsers a checkpoint gets, and that special tokens of markers reach them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HfTokenizer

from protocol.errors import ModelLoadError
from router.chat.conversation import Conversation, Message, Tool
from router.chat.markup import (
    REASONING_MARKERS,
    TOOL_MARKUPS,
    find_markup,
)
from router.parser_names import REASONING_PARSERS, TOOL_PARSERS
from router.text.tokenizer import Tokenizer

HERMES = "{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call>"
MISTRAL = "{% for t in tools %}[AVAILABLE_TOOLS]{% endfor %}"
ASKED = Conversation((Message("user", "?"),), (Tool("f"),))
Load = Callable[..., Tokenizer]


@pytest.fixture
def load(checkpoint: Path, tmp_path: Path) -> Iterator[Load]:
    """The checkpoint's tokenizer with another template and more special tokens."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    loaded: list[Tokenizer] = []

    def load_with(template: str | None, *special: str) -> Tokenizer:
        file = folder / "tokenizer.json"
        tokenizer = HfTokenizer.from_file(str(file))
        tokenizer.add_special_tokens(list(special))
        tokenizer.save(str(file))
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        loaded.append(Tokenizer(folder))
        return loaded[-1]

    yield load_with
    for each in loaded:
        each.close()


@pytest.mark.parametrize(
    ("template", "special", "tools", "reasoning"),
    [
        (HERMES, (), "hermes", None),
        (HERMES + "</think>", ("<think>", "</think>"), "hermes", "think"),
        (MISTRAL, ("[TOOL_CALLS]", "[ARGS]"), "mistral", None),
        (MISTRAL + "[THINK][/THINK]", ("[TOOL_CALLS]",), "mistral", "mistral"),
        ("{{ tools }}", ("<|python_tag|>",), "llama3", None),
        ("{{ tools }}", ("<|python_tag|>", "<|python_start|>"), "pythonic", None),
        ("{{ tools }} as [func_name1(a=1)]", ("<|python_tag|>",), "pythonic", None),
        ("{{ tools }}", (), None, None),
        ("<tool_call> without the tools", (), None, None),
        (None, ("[TOOL_CALLS]",), None, None),
    ],
)
def test_the_family_is_what_the_checkpoint_shows(load, template, special, tools, reasoning):
    markup = find_markup(load(template, *special))
    assert markup.tools is (TOOL_MARKUPS[tools] if tools else None)
    assert markup.reasoning is (REASONING_MARKERS[reasoning] if reasoning else None)


def test_an_operator_s_word_comes_first(load):
    tokenizer = load(HERMES + "</think>")
    markup = find_markup(tokenizer, "llama3", "none")
    assert markup.tools is TOOL_MARKUPS["llama3"]
    assert markup.reasoning is None
    assert find_markup(tokenizer, "none", "mistral").tools is None
    with pytest.raises(ModelLoadError, match="no parser is called 'gpt'"):
        find_markup(tokenizer, "gpt")


def test_every_parser_can_be_named():
    assert {"auto", "none", *TOOL_MARKUPS} == set(TOOL_PARSERS)
    assert {"auto", "none", *REASONING_MARKERS} == set(REASONING_PARSERS)


def test_special_tokens_of_markers_are_text_where_a_parser_needs_them(load):
    tokenizer = load(MISTRAL, "[TOOL_CALLS]", "[ARGS]")
    markup = find_markup(tokenizer)
    ids = tokenizer.encode("[TOOL_CALLS]f[ARGS]{}<|end|>", add_special_tokens=False)
    kept = tokenizer.detokenizer(kept_ids=markup.kept_ids(ASKED))
    assert "".join(map(kept.push, ids)) == "[TOOL_CALLS]f[ARGS]{}"
    plain = tokenizer.detokenizer(kept_ids=markup.kept_ids(Conversation(ASKED.messages)))
    assert "".join(map(plain.push, ids)) == "f{}"
