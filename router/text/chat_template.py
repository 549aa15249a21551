"""Chat messages to prompt text, with the checkpoint's own Jinja template.

Templates get the same environment as in Hugging Face's transformers: sandbox, loop controls,
`raise_exception`, `strftime_now`, `tojson` without HTML escaping, and the `{% generation %}` tag,
which has no effect on the text. A template is compiled once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import InvalidRequest, ModelLoadError

RESERVED_NAMES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
)
"""Names that `chat_template_kwargs` may not set."""


class ChatTemplate:
    """One compiled template, with the special tokens it may refer to (`bos_token`, ...).

    `variables` are the names that the template reads from its caller; `source` is its text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.knows_developer_role = "developer" in source
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text. Raises InvalidRequest with the template's own message."""
        names = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(names)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidRequest(
                f"the chat template refuses 'messages': {error}", "messages"
            ) from error


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part; renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
