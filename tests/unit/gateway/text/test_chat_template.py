"""Chat templates, and that they see what transformers would show them."""

from __future__ import annotations

import re
from datetime import datetime

import pytest

from gateway.text.chat_template import ChatTemplate
from protocol.errors import InvalidRequest, ModelLoadError

USER = [{"role": "user", "content": "hi <b>"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(USER, True, variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi <b>"),
        ("{% if add_generation_prompt %}yes{% endif %}", "yes"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi <b>"}]'),
        ("{{ {'b': 'é', 'a': 1} | tojson(sort_keys=true) }}", '{"a": 1, "b": "é"}'),
        ("{% for m in [1,2,3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}{{ 1 + 1 }}{% endgeneration %}", "2"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ thinking is defined and thinking }}", "True"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
    ],
)
def test_a_template_renders_as_under_transformers(source, text):
    assert render(source, thinking=True) == text


def test_rendering_equals_transformers_on_the_same_template():
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "  {%- if m.role == 'user' %}\n    U:{{ m | tojson }}"
        "\n  {% else %}\n{% generation %}A:{{ m.content }}{% endgeneration %}\n  {% endif %}\n"
        "{% endfor %}\n{% if add_generation_prompt %}\nA:{% endif %}"
    )
    messages = [*USER, {"role": "assistant", "content": "'quoted' & ünïcode"}, *USER]
    rendered, _ = transformers.render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(messages) == rendered[0]


def test_the_date_is_the_clock_s():
    before = datetime.now().strftime("%Y")
    text = render("{{ strftime_now('%Y') }}")
    assert before <= text <= datetime.now().strftime("%Y")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
    ],
)
def test_what_a_template_refuses_is_the_caller_s_error(source, message):
    with pytest.raises(InvalidRequest, match=re.escape(message)) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_broken_template_stops_the_start():
    with pytest.raises(ModelLoadError, match="chat template"):
        ChatTemplate("{% if %}", {})


def test_the_caller_s_variables_cannot_replace_the_conversation():
    text = ChatTemplate("{{ messages | length }}", {}).render(USER, True, {"messages": []})
    assert text == "1"
