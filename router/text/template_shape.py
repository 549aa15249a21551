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
_CALL_ID = "call12345"
_PARTS_AS_PYTHON = re.compile(r"""['"](text|thinking)['"]""")


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """What a template reads. Messages of `part_roles` may have their content in parts, those of
    `only_part_roles` must, in a single one if their role is not among `part_roles`.
    `reasoning_names` are the names under which it reads reasoning, unless it reads
    `reasoning_in_parts`. An empty answer `needs_parts_if_empty` if the template refuses it as
    text."""

    knows_developer_role: bool = False
    arguments_as_text: bool = False
    part_roles: frozenset[str] = frozenset()
    only_part_roles: frozenset[str] = frozenset()
    reasoning_names: tuple[str, ...] = _REASONING_NAMES[:1]
    reasoning_in_parts: bool = False
    needs_parts_if_empty: bool = False


def shape_of(source: str, render: Render) -> TemplateShape:
    """The shape of the template with this source. `render` raises InvalidRequest for what the
    template refuses."""
    probe = _Probe(render)
    for role in ("user", "assistant", "system", "tool"):  # the later ones stand behind the earlier
        probe.find_form_of(role)
    read = [name for name in _REASONING_NAMES if re.search(rf"\b{name}\b", source)]
    return TemplateShape(
        knows_developer_role="developer" in source,
        arguments_as_text=_wants_text_arguments(probe),
        part_roles=frozenset(probe.part_roles),
        only_part_roles=frozenset(probe.only_part_roles),
        reasoning_names=tuple(read) or _REASONING_NAMES[:1],
        reasoning_in_parts=_reads_reasoning_parts(probe),
        needs_parts_if_empty=_refuses_empty_text(probe),
    )


class _Probe:
    """Renders small conversations, in the form that the template takes as far as it is known."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.part_roles: set[str] = set()
        self.only_part_roles: set[str] = set()

    def find_form_of(self, role: str) -> None:
        """Find out how the template takes the content of messages of this role."""
        if self._is_written(role, [text_part(_FIRST), text_part(_SECOND)]):
            self.part_roles.add(role)
        text = f"{_FIRST}\n{_SECOND}"
        if not self._is_written(role, text) and (
            role in self.part_roles or self._is_written(role, [text_part(text)])
        ):
            self.only_part_roles.add(role)

    def with_content(self, role: str, content: Any) -> str:
        """The text of a conversation in which a message of this role has the content; empty if the
        template refuses it."""
        conversations: dict[str, list[dict[str, Any]]] = {
            "system": [{"role": role, "content": content}, self._message("user")],
            "user": [{"role": role, "content": content}],
            "assistant": [
                self._message("user"), {"role": role, "content": content}, self._message("user")
            ],
            "tool": [
                self._message("user"), self._call({_KEY: _VALUE}),
                self._message("tool") | {"content": content},
            ],
        }  # fmt: skip
        return self._try(conversations[role])

    def with_arguments(self, arguments: dict[str, Any] | str) -> str:
        """The text of a conversation with a call; empty if the template refuses it."""
        return self._try([self._message("user"), self._call(arguments), self._message("tool")])

    def _is_written(self, role: str, content: Any) -> bool:
        """Whether the template writes this content, and not as Python does."""
        text = self.with_content(role, content)
        return _FIRST in text and _SECOND in text and not _PARTS_AS_PYTHON.search(text)

    def _message(self, role: str, text: str = "probe") -> dict[str, Any]:
        content = [text_part(text)] if role in self.only_part_roles else text
        message = {"role": role, "content": content}
        return message | ({"tool_call_id": _CALL_ID, "name": "probe"} if role == "tool" else {})

    def _call(self, arguments: dict[str, Any] | str) -> dict[str, Any]:
        function = {"name": "probe", "arguments": arguments}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        return self._message("assistant", "") | {"tool_calls": [call]}

    def _try(self, messages: Messages) -> str:
        try:
            return self._render(messages)
        except InvalidRequest:
            return ""


def text_part(text: str) -> dict[str, str]:
    """A part of a content."""
    return {"type": "text", "text": text}


def reasoning_part(text: str) -> dict[str, str]:
    """Reasoning as a part of a content, as Mistral's templates take it."""
    return {"type": "thinking", "thinking": text}


def _reads_reasoning_parts(probe: _Probe) -> bool:
    text = probe.with_content("assistant", [reasoning_part(_FIRST), text_part(_SECOND)])
    return _FIRST in text and _SECOND in text and not _PARTS_AS_PYTHON.search(text)


def _refuses_empty_text(probe: _Probe) -> bool:
    if "assistant" not in probe.part_roles - probe.only_part_roles:
        return False
    as_text = probe.with_content("assistant", "")
    return not as_text and bool(probe.with_content("assistant", [text_part("")]))


def _wants_text_arguments(probe: _Probe) -> bool:
    """Whether a template writes the arguments of calls as they are, so that they must be JSON
    text; as an object it would refuse them, or write them as Python does."""
    as_object = probe.with_arguments({_KEY: _VALUE})
    if _VALUE in as_object and f"'{_KEY}'" not in as_object:
        return False
    json_text = f'{{"{_KEY}": "{_VALUE}"}}'
    return json_text in probe.with_arguments(json_text)
