"""Which parsers a checkpoint gets, and that special tokens of markers reach them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HfTokenizer

from gateway.api.chat_prompt import render_conversation
from gateway.chat.conversation import Conversation, Message, Tool, ToolCall
from gateway.chat.markup import REASONING_MARKERS, TOOL_MARKUPS, find_markup
from gateway.chat.message_events import joined_calls
from gateway.output.output_text import TextDelta
from gateway.parser_names import REASONING_PARSERS, TOOL_PARSERS
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ModelLoadError
from protocol.messages import FinishReason
from tests.unit.gateway.chat.families import ASKED as ASKED_BOTH
from tests.unit.gateway.chat.families import TOOLS, written
from tests.unit.gateway.chat.family_templates import OTHERS, PLAIN, TEMPLATES, WRONG

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


HERMES = TEMPLATES["hermes"]


@pytest.mark.parametrize("family", sorted(TEMPLATES))
@pytest.mark.parametrize("special", [(), ("[TOOL_CALLS]", "<tool_call>", "</tool_call>")])
@pytest.mark.parametrize("thinks", [False, True, "closed"])
def test_a_template_speaks_the_format_whose_parser_reads_it_back(load, family, special, thinks):
    template = TEMPLATES[family]
    if thinks == "closed":  # in the prompt alone
        template = template.replace("assistant\\n", "assistant\\n<think>\\n</think>")
    elif thinks:  # in the prompt, and in the history in another way
        template = template.replace("assistant\\n", "assistant\\n<think>\\n").replace(
            PLAIN, "{% if m.role == 'assistant' %}{{ '<think></think>\\n' }}{% endif %}" + PLAIN
        )
    markup = find_markup(load(template, *special))
    assert markup.tools is TOOL_MARKUPS[family]
    assert markup.reasoning is (REASONING_MARKERS["think"] if thinks else None)


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_what_the_template_writes_of_an_answer_s_calls_is_read_as_them(load, family):
    """Round trip: calls, written by the family, read, rendered in the history, and read again."""
    tokenizer = load(TEMPLATES[family])
    markup, template = find_markup(tokenizer), tokenizer.tool_template
    text = [("weather", {"city": "Köln {}"}), ("get.time", {})]
    for calls in (text[:1], text[1:], text):
        parser = markup.parser(ASKED_BOTH, "", "seed")
        message = parser.push(TextDelta(written(family, calls), [], finish=FinishReason.STOP))
        told = tuple(
            ToolCall(call.begin.id, call.begin.name, call.arguments)
            for call in joined_calls(message.events)
        )
        history = (*ASKED_BOTH.messages, Message("assistant", "", tool_calls=told))
        again = Conversation(history, TOOLS, add_generation_prompt=False)
        asked = Conversation(history[:1]).messages_for_template(template.shape(has_tools=True))
        prompt = template.render(asked)
        [whole] = render_conversation(template, again, markup)
        assert whole.endswith("<|end|>\n")
        if calls == text and family in ("functionary", "llama3", "function_tag"):
            continue  # whose small templates have nothing between two calls
        rest = whole.removesuffix("<|end|>\n")[whole.rindex("assistant\n") + 10 :]
        assert prompt.rstrip(">").endswith("assistant\n")
        delta = TextDelta(rest, [], finish=FinishReason.STOP)
        read = joined_calls(markup.parser(ASKED_BOTH, "", "seed").push(delta).events)
        assert [(c.begin.name, json.loads(c.arguments)) for c in read] == calls


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_template_that_writes_calls_wrongly_keeps_its_tools(load, name):
    family, template = WRONG[name]
    assert find_markup(load(template, "[TOOL_CALLS]")).tools is TOOL_MARKUPS[family]


def test_a_template_without_quotes_gets_them_with_the_values(load):
    tokenizer = load(WRONG["values without quotes"][1])
    arguments = {"city": 'It\'s "Köln"', "days": 2, "more": {"a": None}}
    told = (ToolCall("c", "weather", json.dumps(arguments)),)
    history = (*ASKED_BOTH.messages, Message("assistant", "", tool_calls=told))
    again = Conversation(history, TOOLS, add_generation_prompt=False)
    markup = find_markup(tokenizer)
    [whole] = render_conversation(tokenizer.tool_template, again, markup)
    call = whole[whole.index("[weather") :].removesuffix("<|end|>\n")
    assert call == "[weather(city='It\\'s \"Köln\"', days=2, more={'a': None})]"
    delta = TextDelta(call, [], finish=FinishReason.STOP)
    (read,) = joined_calls(markup.parser(ASKED_BOTH, "", "seed").push(delta).events)
    assert json.loads(read.arguments) == arguments


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_format_that_no_parser_reads_is_none_and_says_why(load, name):
    markup = find_markup(load(OTHERS[name], "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]"))
    assert markup.tools is None
    if "not written" in name:
        assert "writes no past calls" in markup.no_tools_reason
    else:
        assert "no parser reads back" in markup.no_tools_reason
        assert "Probetown" in markup.no_tools_reason


def test_a_template_may_want_the_result_behind_a_call(load):
    strict = "{%- if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    assert find_markup(load(strict + HERMES)).tools is TOOL_MARKUPS["hermes"]
    drops = (
        "{%- if messages[-1].role == 'assistant' %}{% set messages = messages[:-1] %}{% endif %}"
    )
    assert find_markup(load(drops + TEMPLATES["nemotron"])).tools is TOOL_MARKUPS["nemotron"]


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", None])
def test_without_tools_in_the_template_there_are_none(load, template):
    markup = find_markup(load(template, "[TOOL_CALLS]"))
    assert (markup.tools, markup.reasoning) == (None, None)
    assert "takes none" in markup.no_tools_reason


@pytest.mark.parametrize("name", sorted(REASONING_MARKERS))
def test_reasoning_has_the_markers_that_the_template_writes(load, name):
    markers = REASONING_MARKERS[name]
    source = f"{{% set begin, end = '{markers.begin}', '{markers.end}' %}}{PLAIN}"
    assert find_markup(load(source, markers.begin, markers.end)).reasoning is markers


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
    tokenizer = load(TEMPLATES["mistral"], "[TOOL_CALLS]", "[ARGS]")
    markup = find_markup(tokenizer)
    ids = tokenizer.encode("[TOOL_CALLS]f[ARGS]{}<|end|>", add_special_tokens=False)
    kept = tokenizer.detokenizer(kept_ids=markup.kept_ids(ASKED))
    assert "".join(map(kept.push, ids)) == "[TOOL_CALLS]f[ARGS]{}"
    plain = tokenizer.detokenizer(kept_ids=markup.kept_ids(Conversation(ASKED.messages)))
    assert "".join(map(plain.push, ids)) == "f{}"
