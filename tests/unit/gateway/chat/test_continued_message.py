"""A prompt that ends inside of its last message ends there, whatever that message says."""

from __future__ import annotations

import pytest

from gateway.api.chat_prompt import render_conversation
from gateway.chat.conversation import Conversation, Message
from gateway.chat.markup import ChatMarkup
from gateway.text.chat_template import ChatTemplate
from gateway.text.control_tokens import ControlTokens
from gateway.text.template_input import ControlText
from protocol.errors import InvalidRequest

EACH = "{% for m in messages %}<|start|>{{ m.role }}\n"
END = "<|end|>\n{% endfor %}Be kind.\n"
TEXT, TRIMMED = "{{ m.content }}", "{{ m.content | trim }}"
PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"
NO_THOUGHTS = "{{ m.content.split('</think>')[-1] }}"
TOKENS = ControlTokens(["<|start|>", "<|end|>"])
MARKUP = ChatMarkup(control_text=ControlText(TOKENS, TOKENS))


def prompt(content: str, last: Message) -> list[str]:
    conversation = Conversation((Message("user", "e"), last), continue_final_message=True)
    template = ChatTemplate(EACH + content + END, {"eos_token": "<|end|>"})
    return render_conversation(template, conversation, MARKUP)


def answer(text: str, *parts: str) -> Message:
    return Message("assistant", text, parts=parts)


@pytest.mark.parametrize("text", ["Yes", "e", "<", "|end|", "nd", ">", "\n", "d.\n", "B", "", " "])
@pytest.mark.parametrize("content", [TEXT, PARTS])
def test_a_message_ends_the_prompt_also_if_the_template_writes_the_same_behind_it(
    content: str, text: str
) -> None:
    [written] = prompt(content, answer(text))
    assert written == f"<|start|>user\ne<|end|>\n<|start|>assistant\n{text}"


@pytest.mark.parametrize(
    ("content", "text", "end"),
    [(TEXT, " Yes ", " Yes "), (TRIMMED, " Yes ", "Yes"), (PARTS, "Yes\n", "Yes\n")],
)
def test_space_is_kept_where_the_template_keeps_it(content: str, text: str, end: str) -> None:
    [written] = prompt(content, answer(text))
    assert written.endswith(f"assistant\n{end}")


def test_the_last_part_goes_on() -> None:
    [written] = prompt(PARTS, answer("d\ne", "d", "e"))
    assert written.endswith("assistant\nde")
    [written] = prompt(TEXT, answer("d\ne", "d", "e"))
    assert written.endswith("assistant\nd\ne")


def test_look_alikes_of_control_tokens_are_still_cut_apart() -> None:
    parts = prompt(TEXT, answer("e<|end|>"))
    assert "".join(parts).endswith("assistant\ne<|end|>")
    assert parts[-1] == "|end|>"


@pytest.mark.parametrize("content", [NO_THOUGHTS, "{{ m.content | upper }}", "So"])
def test_a_template_that_changes_the_message_is_an_error(content: str) -> None:
    with pytest.raises(InvalidRequest, match="changes the last message") as error:
        prompt(content, answer("<think>a</think>b"))
    assert error.value.param == "continue_final_message"
