"""How the served model marks tool calls and reasoning, as detected from its checkpoint.

The model family is detected from its chat template and its special tokens; an operator may name
the family instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.errors import ModelLoadError
from router.chat import hermes, llama, mistral, pythonic
from router.chat.conversation import Conversation
from router.chat.message_parser import MessageParser
from router.chat.reasoning import ReasoningMarkers, ReasoningParser
from router.chat.tool_grammar import CallForm, ToolGrammar
from router.chat.tool_parser import CallIds, ToolParser
from router.parser_names import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolMarkup:
    """How a model family calls tools. `markers` are texts that may be single tokens.

    A model whose vocabulary has the token `newer_marker` writes calls in the `newer_form`.
    """

    parser: type[ToolParser]
    markers: tuple[str, ...]
    form: CallForm
    newer_marker: str | None = None
    newer_form: CallForm | None = None
    short_ids: bool = False

    def grammar(self, ids: Mapping[str, int]) -> ToolGrammar:
        """The grammar builder for a vocabulary in which these markers are tokens."""
        if self.newer_form is not None and self.newer_marker in ids:
            return ToolGrammar(self.newer_form, ids)
        return ToolGrammar(self.form, ids)

    def call_ids(self, seed: str) -> CallIds:
        """Call ids derived from the seed, so that every attempt produces the same ids."""

        def call_id(index: int) -> str:
            digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=12).hexdigest()
            return digest[:9] if self.short_ids else f"call_{digest}"

        return call_id


TOOL_MARKUPS = {
    "hermes": ToolMarkup(hermes.HermesParser, (hermes.BEGIN, hermes.END), hermes.FORM),
    "llama3": ToolMarkup(llama.LlamaParser, (llama.MARKER,), llama.FORM),
    "mistral": ToolMarkup(
        mistral.MistralParser,
        mistral.SPECIAL_MARKERS,
        mistral.LIST_FORM,
        mistral.ARGS,
        mistral.NAMED_FORM,
        short_ids=True,
    ),
    "pythonic": ToolMarkup(pythonic.PythonicParser, (pythonic.BEGIN, pythonic.END), pythonic.FORM),
}
REASONING_MARKERS = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
}


@dataclass(frozen=True, slots=True)
class ChatMarkup:
    """The markup of the served model, for its parsers; None where the model has no such markup.

    `tool_ids` and `reasoning_ids` are the marker tokens; the parsers need their text.
    """

    tools: ToolMarkup | None = None
    reasoning: ReasoningMarkers | None = None
    tool_ids: Mapping[str, int] = field(default_factory=dict)
    reasoning_ids: Mapping[str, int] = field(default_factory=dict)

    def kept_ids(self, conversation: Conversation) -> frozenset[int]:
        """Special tokens whose text must be kept in an answer."""
        tool_ids = self.tool_ids.values() if conversation.may_call_tools else ()
        return frozenset((*self.reasoning_ids.values(), *tool_ids))

    def grammar(
        self, conversation: Conversation, prompt: str, form_without_calls: str | None = None
    ) -> str | None:
        """The grammar of an answer, for the tool choice and for strict tools; None if any text is
        allowed. `form_without_calls` constrains an answer that may call tools but does not.
        Raises InvalidRequest."""
        if self.tools is None or not conversation.may_call_tools:
            return None
        grammar = self.tools.grammar({**self.tool_ids, **self.reasoning_ids})
        return grammar.of(conversation, self.reasoning, prompt, form_without_calls)

    def parser(
        self, conversation: Conversation, prompt: str, seed: str, reasons: bool = True
    ) -> MessageParser:
        """A parser of one answer to the conversation.

        `prompt` is the conversation's rendered text. `seed` is unique to the choice and the same
        in every attempt. `reasons` is False for an answer that cannot begin with reasoning.
        """
        reasoning = tools = None
        if self.reasoning is not None and reasons:
            goes_on = conversation.continue_final_message
            is_open = not goes_on and self.reasoning.is_open(prompt)
            reasoning = ReasoningParser(self.reasoning, is_open)
        if self.tools is not None and conversation.may_call_tools:
            names = frozenset(tool.name for tool in conversation.tools)
            tools = self.tools.parser(self.tools.call_ids(seed), names)
        return MessageParser(reasoning, tools, None if conversation.parallel_tool_calls else 1)


def find_markup(
    tokenizer: Tokenizer, tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> ChatMarkup:
    """The served model's markup; parsers given by name override the detected ones.

    Raises ModelLoadError for an unknown name.
    """
    tool_name = _tool_family(tokenizer) if tool_parser == AUTO else tool_parser
    reasoning_name = _reasoning_family(tokenizer) if reasoning_parser == AUTO else reasoning_parser
    if tool_name not in TOOL_PARSERS or reasoning_name not in REASONING_PARSERS:
        raise ModelLoadError(f"no parser is called {tool_name!r} or {reasoning_name!r}")
    tools = TOOL_MARKUPS.get(tool_name)
    reasoning = REASONING_MARKERS.get(reasoning_name)
    return ChatMarkup(
        tools,
        reasoning,
        tool_ids=_ids(tokenizer, tools.markers if tools else ()),
        reasoning_ids=_ids(tokenizer, (reasoning.begin, reasoning.end) if reasoning else ()),
    )


def _tool_family(tokenizer: Tokenizer) -> str:
    template = tokenizer.chat_template
    if template is None or "tools" not in template.variables:
        return NONE
    if hermes.BEGIN in template.source:
        return "hermes"
    if mistral.MARKER in template.source or tokenizer.added_token_id(mistral.MARKER) is not None:
        return "mistral"
    if pythonic.EXAMPLE in template.source or tokenizer.added_token_id(pythonic.BEGIN) is not None:
        return "pythonic"
    if llama.MARKER in template.source or tokenizer.added_token_id(llama.MARKER) is not None:
        return "llama3"
    return NONE


def _reasoning_family(tokenizer: Tokenizer) -> str:
    source = tokenizer.chat_template.source if tokenizer.chat_template else ""
    for name, markers in REASONING_MARKERS.items():
        if markers.end in source:
            return name
    return NONE


def _ids(tokenizer: Tokenizer, markers: tuple[str, ...]) -> dict[str, int]:
    found = {marker: tokenizer.added_token_id(marker) for marker in markers}
    return {marker: id_ for marker, id_ in found.items() if id_ is not None}
