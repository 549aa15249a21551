"""The form in which a chat template wants its input, detected by rendering small conversations.

Templates differ in whether they write the parts of a message's content one by one, whether they
encode the arguments of a call themselves, and under which name they read reasoning. A template may
take another form with tools or documents, so each combination has its own shape.
"""

from __future__ import annotations

import json
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
_SHORT_IDS, _LONG_IDS = ("call12345", "call12346"), ("call_0123456789abcdef",)
_ENCODED_PART = re.compile(rf"""['"](text|thinking)\\?['"]\s*:\s*\\?['"]({_FIRST}|{_SECOND})""")
_ROLES = ("user", "assistant", "system", "developer", "tool")
_PARAMETERS = {
    "type": "object",
    "properties": {"probe": {"type": "string", "description": "probe"}},
    "required": ["probe"],
}
PROBE_TOOLS = (
    {
        "type": "function",
        "function": {"name": "probe", "description": "probe", "parameters": _PARAMETERS},
    },
)
PROBE_DOCUMENTS = ({"doc_id": "1", "title": "probe", "text": "probe"},)
"""The tools and documents that some probes have."""


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """The form of a template's input.

    - `arguments_as_text`: arguments of calls must be JSON text, not objects.
    - `unquoted_arguments`: the template writes text arguments without quotes, so they must be
      literals.
    - `part_roles`: content may be a list of parts.
    - `only_part_roles`: content must be a list; roles in this set alone take one part.
    - `reasoning_names`: the names under which the template reads reasoning, unless it reads
      `reasoning_in_parts`.
    - `needs_parts_if_empty`: the template refuses an empty string as an answer.
    - `single_calls`: a message may have only one call.
    - `short_call_ids`: ids of calls must be nine letters and digits.
    """

    knows_developer_role: bool = False
    arguments_as_text: bool = False
    unquoted_arguments: bool = False
    part_roles: frozenset[str] = frozenset()
    only_part_roles: frozenset[str] = frozenset()
    reasoning_names: tuple[str, ...] = _REASONING_NAMES[:1]
    reasoning_in_parts: bool = False
    needs_parts_if_empty: bool = False
    single_calls: bool = False
    short_call_ids: bool = False


def shape_of(source: str, render: Render) -> TemplateShape | None:
    """The shape of the template with this source; None if the template refuses every probe.
    `render` raises InvalidRequest if the template refuses the messages."""
    probe = _Probe(render)
    probe.find_forms()
    if _wants_text_arguments(probe):
        probe.arguments_as_text = True
    if probe.arguments_as_text or probe.only_part_roles:
        probe.find_forms()  # again, since the messages around now have the right form
    read = [name for name in _REASONING_NAMES if re.search(rf"\b{name}\b", source)]
    shape = TemplateShape(
        knows_developer_role="developer" in source,
        arguments_as_text=probe.arguments_as_text,
        unquoted_arguments=_leaves_out_quotes(probe),
        part_roles=frozenset(probe.part_roles),
        only_part_roles=frozenset(probe.only_part_roles),
        reasoning_names=tuple(read) or _REASONING_NAMES[:1],
        reasoning_in_parts=_reads_reasoning_parts(probe),
        needs_parts_if_empty=_refuses_empty_text(probe),
        single_calls=_takes_single_calls_only(probe),
        short_call_ids=_takes_short_ids_only(probe),
    )
    return shape if probe.rendered else None


class _Probe:
    """Renders small conversations in the form detected so far. `rendered`: the template accepted
    at least one of them."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.rendered = False
        self.arguments_as_text = False
        self.part_roles: set[str] = set()
        self.only_part_roles: set[str] = set()

    def find_forms(self) -> None:
        """Detect the form of content for each role. A later role's probe contains messages of the
        earlier roles."""
        for role in _ROLES:
            self._find_form_of(role)

    def _find_form_of(self, role: str) -> None:
        """A role takes a form if the template writes this form wherever it writes any form."""
        parts, text = [text_part(_FIRST), text_part(_SECOND)], f"{_FIRST}\n{_SECOND}"
        takes_parts, takes_text, takes_one_part = True, True, True
        num_places = 0
        for place in range(len(self._places(role, ""))):
            as_parts, as_text = (self._is_written(role, each, place) for each in (parts, text))
            as_one_part = as_parts or (
                not as_text and self._is_written(role, [text_part(text)], place)
            )
            if as_text or as_one_part:
                num_places += 1
                takes_parts &= as_parts
                takes_text &= as_text
                takes_one_part &= as_one_part
        for roles, is_taken in (
            (self.part_roles, takes_parts),
            (self.only_part_roles, takes_one_part and not takes_text),
        ):
            roles.discard(role)
            if num_places and is_taken:
                roles.add(role)

    def with_content(self, role: str, content: Any, place: int = 0) -> str:
        """The rendered conversation in which the message of this role at `place` has the content;
        empty if the template refuses the conversation."""
        return self._try(self._places(role, content)[place])

    def with_arguments(self, arguments: dict[str, Any] | str) -> str:
        """The text of a conversation with a call; empty if the template refuses it."""
        calls, result = self._calls(_SHORT_IDS[:1]), self._result(_SHORT_IDS[0])
        calls["tool_calls"][0]["function"]["arguments"] = arguments
        return self._try([self._message("user"), calls, result])

    def with_calls(self, ids: Sequence[str], each_alone: bool = False) -> str:
        """The text of a conversation with calls of these ids, which are also their arguments, in
        one message or in one for each; empty if the template refuses it."""
        messages = [self._message("user")]
        if each_alone:
            for each in ids:
                messages += [self._calls([each]), self._result(each)]
        else:
            messages += [self._calls(ids), *map(self._result, ids)]
        return self._try(messages)

    def _places(self, role: str, content: Any) -> list[list[dict[str, Any]]]:
        """Conversations with the content in a message of this role, at each place where requests
        have such messages."""
        user, answer, system = map(self._message, ("user", "assistant", "system"))
        calls, result = self._calls(_SHORT_IDS[:1]), self._result(_SHORT_IDS[0])
        given = {"role": role, "content": content}
        if role == "user":
            return [
                [given], [system, given], [system, given, answer, user],
                [user, answer, given], [user, calls, result, given],
            ]  # fmt: skip
        if role == "assistant":
            return [[user, given, user], [user, given], [user, calls | given, result]]
        if role == "tool":
            result |= given
            return [[user, calls, result], [user, calls, result, answer, user]]
        return [[given, user], [given, user, answer, user], [user, answer, given, user]]

    def _is_written(self, role: str, content: Any, place: int) -> bool:
        """Whether the template writes the text itself, not an encoding of the parts."""
        text = self.with_content(role, content, place)
        return _FIRST in text and _SECOND in text and not _ENCODED_PART.search(text)

    def _message(self, role: str, text: str = "probe") -> dict[str, Any]:
        content = [text_part(text)] if role in self.only_part_roles else text
        return {"role": role, "content": content}

    def _result(self, call_id: str) -> dict[str, Any]:
        return self._message("tool") | {"tool_call_id": call_id, "name": "probe"}

    def _calls(self, ids: Sequence[str]) -> dict[str, Any]:
        calls = []
        for each in ids:
            arguments: Any = {_KEY: f"of {each}"}
            if self.arguments_as_text:
                arguments = json.dumps(arguments)
            function = {"name": "probe", "arguments": arguments}
            calls.append({"id": each, "type": "function", "function": function})
        return self._message("assistant", "") | {"tool_calls": calls}

    def _try(self, messages: Messages) -> str:
        try:
            text = self._render(messages)
        except InvalidRequest:
            return ""
        self.rendered = True
        return text


def text_part(text: str) -> dict[str, str]:
    """A part of a content."""
    return {"type": "text", "text": text}


def reasoning_part(text: str) -> dict[str, str]:
    """Reasoning as a part of a content, as Mistral's templates take it."""
    return {"type": "thinking", "thinking": text}


def _reads_reasoning_parts(probe: _Probe) -> bool:
    text = probe.with_content("assistant", [reasoning_part(_FIRST), text_part(_SECOND)])
    return _FIRST in text and _SECOND in text and not _ENCODED_PART.search(text)


def _refuses_empty_text(probe: _Probe) -> bool:
    if "assistant" not in probe.part_roles - probe.only_part_roles:
        return False
    as_text = probe.with_content("assistant", "")
    return not as_text and bool(probe.with_content("assistant", [text_part("")]))


def _takes_single_calls_only(probe: _Probe) -> bool:
    """Whether the template refuses or drops the second call of one message, but accepts both in
    two messages."""

    def writes_both(each_alone: bool) -> bool:
        text = probe.with_calls(_SHORT_IDS, each_alone)
        return all(f"of {each}" in text for each in _SHORT_IDS)

    return writes_both(each_alone=True) and not writes_both(each_alone=False)


def _takes_short_ids_only(probe: _Probe) -> bool:
    return bool(probe.with_calls(_SHORT_IDS[:1])) and not probe.with_calls(_LONG_IDS)


def _leaves_out_quotes(probe: _Probe) -> bool:
    """Whether the template writes `key=value` without adding quotes to text, and keeps quotes that
    the value has."""
    if f"{_KEY}={_VALUE}" not in probe.with_arguments({_KEY: _VALUE}):
        return False
    as_literal = probe.with_arguments({_KEY: repr(_VALUE)})
    return re.search(rf"{_KEY}='{_VALUE}'\s*[,)]", as_literal) is not None


def _wants_text_arguments(probe: _Probe) -> bool:
    """Whether arguments must be JSON text: given an object, the template raises or writes Python's
    repr."""
    as_object = probe.with_arguments({_KEY: _VALUE})
    if _VALUE in as_object and f"'{_KEY}'" not in as_object:
        return False
    json_text = f'{{"{_KEY}": "{_VALUE}"}}'
    return json_text in probe.with_arguments(json_text)
