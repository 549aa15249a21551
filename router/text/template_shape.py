"""In which form a chat template wants its input, found out by rendering small conversations.

Templates differ in whether they write the parts of a message's content one by one, whether they
encode the arguments of a call themselves, and under which name they read reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import InvalidRequest

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]

_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking", "thought")
_FIRST, _SECOND = "probeone", "probetwo"
_KEY, _VALUE = "probekey", "probevalue"
_USER = {"role": "user", "content": "probe"}
_RESULT = {"role": "tool", "content": "probe", "tool_call_id": "call12345", "name": "probe"}
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """What a template reads. Messages of `part_roles` may have their content in parts, those of
    `only_part_roles` must. `reasoning_names` are the names under which it reads reasoning."""

    knows_developer_role: bool = False
    arguments_as_text: bool = False
    part_roles: frozenset[str] = frozenset()
    only_part_roles: frozenset[str] = frozenset()
    reasoning_names: tuple[str, ...] = _REASONING_NAMES[:1]


def shape_of(source: str, render: Render) -> TemplateShape:
    """The shape of the template with this source. `render` raises InvalidRequest for what the
    template refuses."""
    read = [name for name in _REASONING_NAMES if re.search(rf"\b{name}\b", source)]
    parts = frozenset(role for role in _ROLES if _takes(render, role, in_parts=True))
    texts = frozenset(role for role in parts if _takes(render, role, in_parts=False))
    return TemplateShape(
        knows_developer_role="developer" in source,
        arguments_as_text=_wants_text_arguments(render),
        part_roles=parts,
        only_part_roles=parts - texts,
        reasoning_names=tuple(read) or _REASONING_NAMES[:1],
    )


def call_message(arguments: dict[str, Any] | str) -> dict[str, Any]:
    """A message of the assistant with one call, as templates take it."""
    function = {"name": "probe", "arguments": arguments}
    call = {"id": "call12345", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _takes(render: Render, role: str, in_parts: bool) -> bool:
    """Whether the template writes the content of a message, in parts or as one text."""
    texts = (_FIRST, _SECOND)
    content: Any = "\n".join(texts)
    if in_parts:
        content = [{"type": "text", "text": text} for text in texts]
    conversations = {
        "system": [{"role": "system", "content": content}, _USER],
        "user": [{"role": "user", "content": content}],
        "assistant": [_USER, {"role": "assistant", "content": content}, _USER],
        "tool": [_USER, call_message({_KEY: _VALUE}), {**_RESULT, "content": content}],
    }
    text = _try(render, conversations[role])
    is_written = all(each in text for each in texts)
    return is_written and not re.search(r"""['"]text['"]""", text)


def _wants_text_arguments(render: Render) -> bool:
    """Whether a template writes the arguments of calls as they are, so that they must be JSON
    text; as an object it would refuse them, or write them as Python does."""
    as_object = _try(render, [_USER, call_message({_KEY: _VALUE}), _RESULT])
    if _VALUE in as_object and f"'{_KEY}'" not in as_object:
        return False
    json_text = f'{{"{_KEY}": "{_VALUE}"}}'
    return json_text in _try(render, [_USER, call_message(json_text), _RESULT])


def _try(render: Render, messages: Messages) -> str:
    """The rendered text; empty if the template refuses the messages."""
    try:
        return render(messages)
    except InvalidRequest:
        return ""
