"""How the served model marks tool calls and reasoning, as detected from its checkpoint.

The model family is detected from its chat template: the one whose parser reads back a call that
the template writes. An operator may name the family instead.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.chat.content_scan import ToolContentScan
from gateway.chat.conversation import Conversation, ToolMode
from gateway.chat.formats import (
    glm,
    harmony,
    hermes,
    invoke_tags,
    llama,
    mistral,
    named_calls,
    object_lists,
    pythonic,
    qwen_coder,
    section_calls,
    seed_oss,
)
from gateway.chat.message_parser import MessageParser
from gateway.chat.reasoning_parser import ReasoningMarkers, ReasoningParser
from gateway.chat.round_trip import TOOL, written_call
from gateway.chat.thought_grammar import marker_parts, thought_rules, with_thoughts
from gateway.chat.tool_grammar import CallForm, ToolGrammar
from gateway.chat.tool_parser import MAX_HELD_CHARS, CallIds, CallParser, ToolParser
from gateway.parser_names import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from gateway.text.control_tokens import ControlTokens
from gateway.text.reasoning_end import ThoughtMarkers
from gateway.text.template_input import ControlText, TemplateInput
from gateway.text.tokenizer import Tokenizer
from http_kit.errors import MAX_PARAM_CHARS, shortened
from protocol.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class ToolMarkup:
    """How a model family calls tools. `markers` are texts that may be single tokens.

    A model whose vocabulary has the token `newer_marker` writes calls in the `newer_form`. `lead`:
    the beginning of the family's calls, if its parser reads calls of other forms, too. `sketch`
    matches calls as templates write them, if their values differ from the models'.
    """

    parser: type[ToolParser] | type[harmony.HarmonyParser]
    markers: tuple[str, ...]
    form: CallForm
    newer_marker: str | None = None
    newer_form: CallForm | None = None
    short_ids: bool = False
    lead: str = ""
    sketch: re.Pattern[str] | None = None

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
    "harmony": ToolMarkup(harmony.HarmonyParser, harmony.MARKERS, harmony.FORM),
    "qwen3_coder": ToolMarkup(
        qwen_coder.QwenCoderParser, (qwen_coder.BEGIN, qwen_coder.END), qwen_coder.FORM
    ),
    "seed_oss": ToolMarkup(seed_oss.SeedParser, (seed_oss.BEGIN, seed_oss.END), seed_oss.FORM),
    "deepseek_v3": ToolMarkup(
        section_calls.DeepSeekParser,
        section_calls.DEEPSEEK_MARKERS,
        section_calls.DEEPSEEK_V3_FORM,
        lead=section_calls.DEEPSEEK_V3_LEAD,
    ),
    "deepseek_v31": ToolMarkup(
        section_calls.DeepSeekParser,
        section_calls.DEEPSEEK_MARKERS,
        section_calls.DEEPSEEK_V31_FORM,
    ),
    "kimi_k2": ToolMarkup(
        section_calls.KimiParser,
        section_calls.KIMI_MARKERS,
        section_calls.KIMI_FORM,
        sketch=section_calls.KIMI_SKETCH,
    ),
    "deepseek_v32": ToolMarkup(
        invoke_tags.DeepSeekV32Parser,
        (invoke_tags.DSML,),
        invoke_tags.dsml_form(invoke_tags.V32_BEGIN, invoke_tags.V32_END),
        lead=invoke_tags.V32_BEGIN,
    ),
    "deepseek_v4": ToolMarkup(
        invoke_tags.DeepSeekV4Parser,
        (invoke_tags.DSML,),
        invoke_tags.dsml_form(invoke_tags.V4_BEGIN, invoke_tags.V4_END),
        lead=invoke_tags.V4_BEGIN,
    ),
    "glm": ToolMarkup(glm.GlmParser, glm.MARKERS, glm.FORM),
    "minimax_m2": ToolMarkup(
        invoke_tags.MinimaxParser,
        (invoke_tags.MINIMAX_BEGIN, invoke_tags.MINIMAX_END),
        invoke_tags.MINIMAX_FORM,
    ),
    "hermes": ToolMarkup(hermes.HermesParser, (hermes.BEGIN, hermes.END), hermes.FORM),
    "nemotron": ToolMarkup(
        object_lists.NemotronParser,
        (object_lists.NEMOTRON_BEGIN, object_lists.NEMOTRON_END),
        object_lists.NEMOTRON_FORM,
    ),
    "mistral": ToolMarkup(
        mistral.MistralParser,
        mistral.SPECIAL_MARKERS,
        mistral.LIST_FORM,
        mistral.ARGS,
        mistral.NAMED_FORM,
        short_ids=True,
    ),
    "function_tag": ToolMarkup(
        named_calls.FunctionTagParser,
        (named_calls.FUNCTION_BEGIN, named_calls.FUNCTION_END),
        named_calls.FUNCTION_FORM,
    ),
    "functionary": ToolMarkup(
        named_calls.RecipientParser, (named_calls.RECIPIENT,), named_calls.RECIPIENT_FORM
    ),
    "pythonic": ToolMarkup(
        pythonic.PythonicParser,
        (pythonic.BEGIN, pythonic.END, pythonic.TAG),
        pythonic.FORM,
        sketch=pythonic.SKETCH,
    ),
    "xlam": ToolMarkup(object_lists.ListParser, (), object_lists.FORM, lead="["),
    "llama3": ToolMarkup(llama.LlamaParser, (llama.MARKER,), llama.FORM, lead='{"'),
}
"""Families by name. If several can read a template's calls, the first is used."""
REASONING_MARKERS = {
    "harmony": ReasoningMarkers(
        harmony.ANALYSIS,
        harmony.END,
        harmony.NEXT,
        harmony.ANSWER,
        harmony.MARKERS,
        sign=harmony.ANALYSIS,
    ),
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningMarkers("<seed:think>", "</seed:think>"),
}


NO_FORMAT = "the operator chose no format of calls"


@dataclass(frozen=True, slots=True)
class ChatMarkup:
    """The markup of the served model, for its parsers; None where the model has no such markup.

    `tool_ids` and `reasoning_ids` are the marker tokens; the parsers need their text.
    `no_tools_reason` says why `tools` is None. `control_text` is None if control tokens in users'
    text are allowed.
    """

    tools: ToolMarkup | None = None
    reasoning: ReasoningMarkers | None = None
    tool_ids: Mapping[str, int] = field(default_factory=dict)
    reasoning_ids: Mapping[str, int] = field(default_factory=dict)
    no_tools_reason: str = NO_FORMAT
    control_text: ControlText | None = None

    def mark_control_tokens(self, given: TemplateInput) -> str | None:
        """Marks what looks like control tokens in a template's input; returns the mark, or None
        if there is none. Raises InvalidRequest."""
        return None if self.control_text is None else self.control_text.mark(given)

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
        thoughts = self.thoughts(conversation, prompt) if reasons else None
        return self.parser_behind(thoughts, conversation, seed)

    def parser_behind(
        self, thoughts: ThoughtMarkers | None, conversation: Conversation, seed: str
    ) -> MessageParser:
        """Like `parser`, given the result of `thoughts`. That is None for an answer that cannot
        begin with reasoning."""
        reasoning, tools = None, self._tool_parser(conversation, seed)
        has_headers = isinstance(tools, harmony.HarmonyParser)
        if self.reasoning is not None and thoughts is not None and not has_headers:
            call_markers = tools.certain_markers if tools is not None else ()
            reasoning = ReasoningParser(self.reasoning, thoughts.is_open, call_markers)
        return MessageParser(reasoning, tools, None if conversation.parallel_tool_calls else 1)

    def content_scan(self, conversation: Conversation) -> ToolContentScan | None:
        """A scan that separates the content of one answer from its calls; None if the answer can
        have no calls."""
        tools = self._tool_parser(conversation, "")
        return None if tools is None else ToolContentScan(tools)

    def _tool_parser(self, conversation: Conversation, seed: str) -> CallParser | None:
        schemas = {tool.name: tool.schema for tool in conversation.tools}
        if self.has_headers:
            tools = self.tools if conversation.may_call_tools else None
            call_ids = (tools or TOOL_MARKUPS["harmony"]).call_ids(seed)
            is_open = bool(conversation.prefill)
            return harmony.HarmonyParser(call_ids, schemas if tools else {}, is_open=is_open)
        if self.tools is None or not conversation.may_call_tools:
            return None
        is_enforced = conversation.tool_choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED)
        max_held_chars = 0 if is_enforced else MAX_HELD_CHARS
        return self.tools.parser(self.tools.call_ids(seed), schemas, max_held_chars)

    @property
    def has_headers(self) -> bool:
        """Whether all text of an answer stands behind headers, so that it is always parsed."""
        return self.reasoning is not None and bool(self.reasoning.tokens)

    def thoughts(self, conversation: Conversation, prompt: str) -> ThoughtMarkers | None:
        """The markers of the answer's reasoning, for code that sees the answer as tokens."""
        if self.reasoning is None:
            return None
        is_open = self.reasoning.is_open(prompt, conversation.prefill)
        return ThoughtMarkers(self.reasoning.begin, self.reasoning.end, is_open)

    def after_thoughts(self, conversation: Conversation, prompt: str, grammar: str) -> str | None:
        """The grammar of an answer that may reason first and then follows `grammar`; None if there
        can be no reasoning."""
        if self.reasoning is None:
            return None
        before, rules = thought_rules(
            self.reasoning, self.reasoning_ids, prompt, conversation.prefill
        )
        if before and self.reasoning.answer:
            tokens, ids = self.reasoning.tokens, self.reasoning_ids
            before = f"{before} {marker_parts(self.reasoning.answer, tokens, ids)}"
        return with_thoughts(before, rules, grammar) if before else None


def find_markup(
    tokenizer: Tokenizer,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    allow_control_tokens: bool = False,
) -> ChatMarkup:
    """The served model's markup; parsers given by name override the detected ones.

    Raises ModelLoadError for an unknown name.
    """
    for template in (tokenizer.chat_template, tokenizer.tool_template):
        assert template is None or template.shape(), "it is found out now, and not by a request"
    reasoning_name = _reasoning_family(tokenizer) if reasoning_parser == AUTO else reasoning_parser
    if tool_parser not in TOOL_PARSERS or reasoning_name not in REASONING_PARSERS:
        raise ModelLoadError(f"no parser is called {tool_parser!r} or {reasoning_name!r}")
    reasoning = REASONING_MARKERS.get(reasoning_name)
    tools, reason = TOOL_MARKUPS.get(tool_parser), ""
    if tool_parser == AUTO:
        tools, reason = _detected_tools(tokenizer, reasoning)
    thought_markers = reasoning.markers if reasoning else ()
    has_headers = reasoning is not None and bool(reasoning.tokens)
    markers = () if has_headers else (*(tools.markers if tools else ()), *thought_markers)
    control = ControlTokens(tokenizer.control_texts)
    return ChatMarkup(
        tools,
        reasoning,
        tool_ids=_ids(tokenizer, tools.markers if tools else ()),
        reasoning_ids=_ids(tokenizer, thought_markers),
        no_tools_reason=reason or NO_FORMAT,
        control_text=None
        if allow_control_tokens
        else ControlText(control, control.without(markers)),
    )


def _detected_tools(
    tokenizer: Tokenizer, reasoning: ReasoningMarkers | None
) -> tuple[ToolMarkup | None, str]:
    """The family whose parser reads back the calls that the template writes, or why none does."""
    template = tokenizer.tool_template
    if template is None or "tools" not in template.variables:
        return None, "the model's chat template takes none"
    within_calls = [each for each in TOOL_MARKUPS.values() if not each.form.is_whole]
    markers = {marker for markup in within_calls for marker in markup.markers}
    call = written_call(template, tokenizer.control_texts - markers, reasoning)
    if call is None:
        return None, "the model's chat template writes no past calls, which would show their format"
    schemas = {TOOL.name: TOOL.schema}
    for markup in TOOL_MARKUPS.values():
        parser = markup.parser(markup.call_ids("probe"), schemas)
        if call.is_read_by(parser, markup.lead, reasoning):
            return markup, ""
    for markup in TOOL_MARKUPS.values():
        if call.is_sketched_by(markup.sketch):
            return markup, ""
    shown = shortened(call.text, MAX_PARAM_CHARS)
    return None, f"no parser reads back the calls that the model's chat template writes: {shown!r}"


def _reasoning_family(tokenizer: Tokenizer) -> str:
    templates = (tokenizer.chat_template, tokenizer.tool_template)
    source = "".join(each.source for each in templates if each is not None)
    for name, markers in REASONING_MARKERS.items():
        if (markers.sign or markers.end) in source:
            return name
    return NONE


def _ids(tokenizer: Tokenizer, markers: tuple[str, ...]) -> dict[str, int]:
    found = {marker: tokenizer.added_token_id(marker) for marker in markers}
    return {marker: id_ for marker, id_ in found.items() if id_ is not None}
