"""Every template gets its input in the form that it wants, as a few renderings show."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest
from msgspec.structs import replace

from gateway.api.chat_prompt import render_conversation
from gateway.chat.conversation import Conversation, Message, Tool, ToolCall
from gateway.chat.markup import ChatMarkup
from gateway.text.chat_template import ChatTemplate
from protocol.errors import InvalidRequest
from tests.paths import DEMO_MODEL

EACH = "{% for m in messages %}"
END = "{% endfor %}"
TEXT = "{{ m.role }}:{{ m.content }};"
BOTH = (
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %};"
)
PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %};"
USERS = "{% if m.role == 'user' %}" + BOTH + "{% else %}{{ m.content }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}CALL{% endfor %}"


def shown(source: str, *messages: Message) -> str:
    template = ChatTemplate(source, {})
    given = [each.for_template(template.shape(), "messages") for each in messages]
    return template.render(given, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("content", "user", "assistant"),
    [
        (TEXT, "user:a\nb;", "assistant:a\nb;"),
        (BOTH, "ab;", "ab;"),
        (PARTS, "ab;", "ab;"),
        (USERS, "ab;", "a\nb"),
        ("{{ m.content | tojson }};", '"a\\nb";', '"a\\nb";'),
        ("{{ m['content'] | trim }};", "a\nb;", "a\nb;"),
    ],
)
def test_parts_of_a_content_are_laid_out_by_the_templates_that_do(
    content: str, user: str, assistant: str
) -> None:
    for role, text in (("user", user), ("assistant", assistant)):
        message = Message(role, "a\nb", parts=("a", "b"))  # type: ignore[arg-type]
        assert shown(EACH + content + END, message) == text


def test_a_template_that_takes_parts_alone_gets_them() -> None:
    assert shown(EACH + PARTS + END, Message("user", "a\nb"), Message("tool", "c")) == "a\nb;c;"


def test_every_role_is_found_out_in_the_form_that_the_roles_before_it_need() -> None:
    asks_for_a_kind = "{% if m.content[0].type == 'image' %}!{% endif %}"
    history = (
        Message("user", "a"),
        Message("assistant", "", tool_calls=(CALL,)),
        Message("tool", "b", parts=("b", "c")),
    )
    assert shown(EACH + asks_for_a_kind + PARTS + END, *history) == "a;;bc;"


FIRST_PART = "{{ m.role }}:{{ m.content[0].text + '' }};"


def test_a_template_that_reads_a_single_part_gets_the_whole_content_in_it() -> None:
    history = (Message("system", "a"), Message("user", "b\nc", parts=("b", "c")))
    assert shown(EACH + FIRST_PART + END, *history) == "system:a;user:b\nc;"
    only_system = "{% if m.role == 'system' %}" + FIRST_PART + "{% else %}" + BOTH + "{% endif %}"
    assert shown(EACH + only_system + END, *history) == "system:a;bc;"


CHUNKS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'thinking' %}[{{ part.thinking }}]"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %};"
)


def test_reasoning_comes_in_a_part_where_the_template_reads_such() -> None:
    answers = (
        Message("assistant", "a", reasoning="Hm"),
        Message("assistant", "a\nb", reasoning="Hm", parts=("a", "b")),
        Message("assistant", "", reasoning="Hm", tool_calls=(CALL,)),
        Message("assistant", "a"),
        Message("user", "a", reasoning="Hm"),
    )
    assert shown(EACH + CHUNKS + END, *answers) == "[Hm]a;[Hm]ab;[Hm];a;a;"
    assert ChatTemplate(EACH + CHUNKS + END, {}).shape().reasoning_in_parts
    assert not ChatTemplate(EACH + BOTH + END, {}).shape().reasoning_in_parts
    as_python = ChatTemplate(EACH + "{{ m.content }}" + END, {})
    assert not as_python.shape().reasoning_in_parts


def test_an_empty_answer_comes_in_parts_where_the_template_refuses_it_as_text() -> None:
    strict = (
        "{% if m.role == 'assistant' and not m.content and not m.tool_calls %}"
        "{{ raise_exception('empty') }}{% endif %}"
    )
    history = (Message("user", "a"), Message("assistant", ""), Message("user", ""))
    assert shown(EACH + strict + BOTH + END, *history) == "a;;;"
    call = Message("assistant", "", tool_calls=(CALL,))
    assert shown(EACH + strict + "{{ m.content is string }}" + BOTH + END, call) == "True;"
    with pytest.raises(InvalidRequest, match="empty"):
        shown(EACH + strict + TEXT + END, *history)


CALL = ToolCall("c", "f", '{"city":  "K"}')


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "K"}'),
        ("{{ c.function.arguments }}", '{"city":  "K"}'),
        ("{{ 'f' + c.function.arguments }}", 'f{"city":  "K"}'),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", "city=K"),
        (
            "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
            "{{ c.function.arguments | tojson }}{% endif %}",
            '{"city": "K"}',
        ),
        ("{{ c.function.name }}", "f"),
        ("{{ c.function.arguments.city }}", "K"),
    ],
)
def test_arguments_come_as_an_object_or_as_text(arguments: str, text: str) -> None:
    source = f"{EACH}{{% for c in m.tool_calls or [] %}}{arguments}{{% endfor %}}{END}"
    assert shown(source, Message("assistant", "", tool_calls=(CALL,))) == text


def test_results_of_calls_with_text_arguments_are_laid_out_too() -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}"
    source = EACH + BOTH + calls + "{% endfor %}" + END
    call = Message("assistant", "", tool_calls=(CALL,))
    assert shown(source, call, Message("tool", "a\nb", parts=("a", "b"))) == ';f{"city":  "K"}ab;'


def test_text_arguments_are_json_also_where_the_model_wrote_none() -> None:
    source = EACH + "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}" + END
    for written, text in (("{city: K}", '{"city": "K"}'), ("", "{}"), ('{"a": "b', '{"a": "b"}')):
        message = Message("assistant", "", tool_calls=(ToolCall("c", "f", written),))
        assert shown(source, message) == text


IDS = "{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}{{ m.tool_call_id }};"
NINE = (
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('nine') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("call_id", ["call_0123456789abcdef", "toolu_01", "x", "a-b-c-d-e", ""])
def test_ids_of_calls_are_shortened_for_the_templates_that_take_no_others(call_id: str) -> None:
    history = (
        Message("assistant", "", tool_calls=(ToolCall(call_id, "f", "{}"),)),
        Message("tool", "b", tool_call_id=call_id),
    )
    assert shown(EACH + IDS + END, *history) == f"{call_id};{call_id};"
    call, result, _ = shown(EACH + NINE + IDS + END, *history).split(";")
    assert call == result
    assert re.fullmatch("[a-zA-Z0-9]{9}", call)
    other = Message("assistant", "", tool_calls=(ToolCall(call_id + "y", "f", "{}"),))
    assert shown(EACH + NINE + IDS + END, other) != f"{call};"
    fits = Message("assistant", "", tool_calls=(ToolCall("Call01234", "f", "{}"),))
    assert shown(EACH + NINE + IDS + END, fits) == "Call01234;"


HISTORY = (
    Message("user", "q"),
    Message(
        "assistant",
        "so",
        reasoning="Hm",
        tool_calls=(ToolCall("a", "f", '{"x": "1"}'), ToolCall("b", "g", '{"x": "2"}')),
    ),
    Message("tool", "of b", tool_call_id="b"),
    Message("tool", "of a", tool_call_id="a"),
    Message("tool", "of c", tool_call_id="c"),
    Message("assistant", "done"),
    Message("assistant", "", tool_calls=(ToolCall("d", "f", '{"x": "3"}'),)),
    Message("tool", "of d", tool_call_id="d"),
)
ONE = "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one') }}{% endif %}"
WRITTEN = (
    "{{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
    "{% for x in c.function.arguments.values() %}{{ x }}{% endfor %}>{% endfor %};"
)
FIRST_CALL = WRITTEN.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
AS_TEXT = """\
{{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}
{%- for c in m.tool_calls or [] %}<{{ c.function.name + c.function.arguments }}>{% endfor %};"""


@pytest.mark.parametrize("calls", [ONE + WRITTEN, FIRST_CALL, ONE + AS_TEXT])
def test_a_template_that_takes_one_call_at_a_time_gets_a_message_for_each(calls: str) -> None:
    template = ChatTemplate(EACH + calls + END, {})
    given = Conversation(HISTORY).messages_for_template(template.shape())
    text = template.render(given, add_generation_prompt=False)
    text = re.sub(r'{"x": "(.)"}', r"\1", text)
    assert text == "q;so(Hm)<f1>;of a;<g2>;of b;of c;done;<f3>;of d;"
    together = ChatTemplate(EACH + WRITTEN + END, {})
    given = Conversation(HISTORY).messages_for_template(together.shape())
    text = together.render(given, add_generation_prompt=False)
    assert text == "q;so(Hm)<f1><g2>;of b;of a;of c;done;<f3>;of d;"


def test_calls_without_results_are_split_too() -> None:
    template = ChatTemplate(EACH + ONE + WRITTEN + END, {})
    given = Conversation(HISTORY[:2]).messages_for_template(template.shape())
    assert template.render(given, add_generation_prompt=False) == "q;so(Hm)<f1>;<g2>;"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_reasoning_comes_under_the_name_that_the_template_reads(name: str) -> None:
    source = f"{EACH}{{{{ m.{name} }}}}{END}"
    assert shown(source, Message("assistant", "", reasoning="Hm")) == "Hm"
    both = f"{EACH}{{{{ m['{name}'] or m.reasoning_content }}}}{END}"
    assert shown(both, Message("assistant", "", reasoning="Hm")) == "Hm"


def test_a_template_that_refuses_everything_has_a_shape() -> None:
    shape = ChatTemplate("{{ raise_exception('no') }}", {}).shape()
    assert (shape.part_roles, shape.arguments_as_text) == (frozenset(), False)


WITH_SYSTEM = (
    "{% if tools or documents %}{{ messages[0].content + '\\n' }}{{ tools | tojson }}{% endif %}"
)
FIRST_USER = "{% if tools and loop.first %}{{ m.content | trim }}{% else %}" + BOTH + "{% endif %}"
LAST_USER = (
    "{% if m.role == 'system' %}{% else %}"
    "{% if m.role == 'user' and loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content + '\\n' + m.content }}{% else %}" + BOTH + "{% endif %}{% endif %}"
)
BESIDE_CALLS = "{% if m.tool_calls %}{{ m.content + '' }}{% else %}" + BOTH + "{% endif %}"
BEHIND_TOOLS = BOTH.replace("string", "string or tools and m.role == 'tool'")
TEMPLATES = {
    "joined with tools": WITH_SYSTEM + EACH + BOTH + END,
    "the first message with tools": EACH + FIRST_USER + END,
    "the last message behind a system prompt": EACH + LAST_USER + END,
    "text beside calls": EACH + BESIDE_CALLS + END,
    "text behind tools": EACH + BEHIND_TOOLS + END,
    "parts alone with tools": f"{EACH}{{% if tools %}}{PARTS}{{% else %}}{BOTH}{{% endif %}}{END}",
}
"""Templates that take parts of some messages of some requests."""


@pytest.mark.parametrize("name", [*sorted(TEMPLATES), "demo_model"])
@pytest.mark.parametrize("has_system", [False, True])
def test_every_shape_of_request_is_written_whole(name: str, has_system: bool) -> None:
    source = (
        TEMPLATES.get(name)
        or json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())["chat_template"]
    )
    template = ChatTemplate(source, {})
    texts = {role: (f"{role} a", f"{role} b") for role in ("system", "user", "assistant", "tool")}
    message = {role: Message(role, "\n".join(each), parts=each) for role, each in texts.items()}
    asked = [message["system"], message["user"]] if has_system else [message["user"]]
    calls = replace(message["assistant"], tool_calls=(CALL,))
    histories = (
        asked,
        [*asked, message["assistant"], message["user"]],
        [*asked, calls, message["tool"]],
        [*asked, calls, message["tool"], message["assistant"], message["user"]],
    )
    for history, tools, documents in product(histories, ((), (Tool("f"),)), ((), ({"text": "t"},))):
        conversation = Conversation(tuple(history), tools, documents=documents)
        [text] = render_conversation(template, conversation, ChatMarkup())
        for each in history:
            if name != "the last message behind a system prompt" or each.role != "system":
                assert all(part in text for part in each.parts)
        assert "'text'" not in text


def test_parts_are_laid_out_where_requests_of_the_same_shape_may_have_them() -> None:
    template = ChatTemplate(TEMPLATES["joined with tools"], {})
    assert "system" in template.shape().part_roles
    assert "system" not in template.shape(has_tools=True).part_roles
    assert "assistant" in template.shape(has_tools=True).part_roles
