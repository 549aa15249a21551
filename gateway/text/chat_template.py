"""Chat messages to prompt text, with the checkpoint's own Jinja template.

Templates get the same environment as in Hugging Face's transformers: sandbox, loop controls,
`raise_exception`, `strftime_now`, `tojson` without HTML escaping, and the `{% generation %}` tag,
which has no effect on the text. A template is compiled once. It is a stranger's program: all its
exceptions become errors of the checkpoint or the request, and its work is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import product
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from gateway.text.rendering_budget import CURRENT, Budget
from gateway.text.template_sandbox import BudgetedEnvironment
from gateway.text.template_shape import PROBE_DOCUMENTS, PROBE_TOOLS, TemplateShape, shape_of
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
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # cheaper than a ChainMap
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:
            raise ModelLoadError(f"the chat template cannot be compiled: {error}") from error

    def shape(self, has_tools: bool = False, has_documents: bool = False) -> TemplateShape:
        """The form of the template's input, with or without tools and documents."""
        return self._shapes[has_tools, has_documents]

    @cached_property
    def _shapes(self) -> dict[tuple[bool, bool], TemplateShape]:
        """The shape for each of `has_tools` and `has_documents`. Renders some forty small
        conversations for each combination that the template can distinguish."""
        shapes: dict[tuple[bool, bool], TemplateShape] = {}
        for has_tools, has_documents in product((False, True), repeat=2):
            known = (
                has_tools and "tools" in self.variables,
                has_documents and "documents" in self.variables,
            )
            shapes[has_tools, has_documents] = shapes.get(known) or self._find_shape(*known)
        return shapes

    def _find_shape(self, has_tools: bool, has_documents: bool) -> TemplateShape:
        tools = PROBE_TOOLS if has_tools else None
        documents = PROBE_DOCUMENTS if has_documents else None
        found = shape_of(
            self.source, lambda messages: self.render(messages, True, None, tools, documents)
        )
        if found is None and (has_tools or has_documents):  # the shape without them
            return self._find_shape(False, False)
        return found or TemplateShape()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        param: str = "messages",
    ) -> str:
        """The prompt text. Raises InvalidRequest with the template's own message, naming the field
        `param`."""
        names = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        token = CURRENT.set(Budget())
        try:
            return self._template.render(names)
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template refuses '{param}': {reason}", param) from error
        finally:
            CURRENT.reset(token)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part; renders its body.
    Variables set in the body are local to it, as in transformers."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 declares

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _environment() -> BudgetedEnvironment:
    environment = BudgetedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.add_filter("tojson", _to_json)
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
