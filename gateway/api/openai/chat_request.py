"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.body_reader import Unsupported, only
from gateway.api.function_tools import (
    MAX_TOOLS,
    AllowedToolsChoice,
    ChosenFunction,
    FunctionFields,
    Hint,
    NamedToolChoice,
    ToolFields,
    functions_of,
    only_allowed,
    tool_choice_shape,
)
from gateway.api.generation_fields import (
    CacheLifetime,
    GenerationFields,
    LogprobsCount,
    openai_lifetime_s,
)
from gateway.api.openai.chat_messages import ChatMessage, continues_last, messages_of
from gateway.api.strict_model import bounded, first_error
from gateway.api.unknown_fields.ignorable_fields import ignorable
from gateway.chat.conversation import Conversation, Tool, ToolChoice, ToolMode
from protocol.errors import InvalidRequest

NO_TEMPLATES = (
    "a template is a program, and no sandbox can limit how long it runs in a router that others "
    "use too; 'chat_template_kwargs' sets variables of the checkpoint's own template, and "
    "/v1/completions takes a prompt that was rendered elsewhere"
)

_ANY_CHOICE = ToolChoice()
_ASKS_NOTHING = (None, "none", "auto")
"""Values of `tool_choice` that are accepted without tools, because they ask for nothing."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationFields):
    """A conversation; the answer is the assistant's next message, `n` times."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), bounded]
    logprobs: bool | None = None
    top_logprobs: LogprobsCount | None = None
    tools: Annotated[list[ToolFields], Field(max_length=MAX_TOOLS), first_error] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required", "any"], Tag("<mode>")]
            | Annotated[NamedToolChoice, Tag("<named>")]
            | Annotated[AllowedToolsChoice, Tag("<allowed>")],
            Discriminator(tool_choice_shape),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], bounded] | None = None
    modalities: Annotated[Any, only(["text"])] = None
    functions: Annotated[list[FunctionFields], Field(max_length=MAX_TOOLS), first_error] | None = (
        None
    )
    function_call: (
        Annotated[
            Annotated[Literal["none", "auto"], Tag("<mode>")]
            | Annotated[ChosenFunction, Tag("<named>")],
            Discriminator(tool_choice_shape),
        ]
        | None
    ) = None
    store: Annotated[Any, ignorable(False)] = None
    service_tier: Hint = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=16),
            first_error,
        ]
        | None
    ) = None
    audio: Unsupported = None
    prediction: Hint = None
    verbosity: Annotated[Any, ignorable("medium")] = None
    web_search_options: Annotated[Any, ignorable()] = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_retention: CacheLifetime = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    chat_template: Annotated[Any, only(why=NO_TEMPLATES)] = None

    @property
    def lifetime_s(self) -> int | None:
        """See the base class."""
        return openai_lifetime_s(self.prompt_cache_retention)

    @property
    def session_name(self) -> str | None:
        """See the base class."""
        return self.session_id or self.prompt_cache_key

    @property
    def logprobs_count(self) -> int | None:
        """Number of alternatives to report per token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def may_call_tools(self) -> bool:
        """Whether the answer may contain calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def conversation(self) -> Conversation:
        """The request as a `Conversation`. Raises InvalidRequest."""
        return Conversation(
            messages=messages_of(self.messages),
            tools=self._usable_tools(),
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls is not False and not self.functions,
            reasoning_effort=self.reasoning_effort,
            template_variables=self.chat_template_kwargs or {},
            documents=tuple(self.documents or ()),
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=continues_last(
                self.messages, self.continue_final_message, self.add_generation_prompt
            ),
        )

    @property
    def is_legacy(self) -> bool:
        """Whether the tools are `functions`, so that a call is a `function_call`."""
        return bool(self.functions)

    def _usable_tools(self) -> tuple[Tool, ...]:
        if self.functions:
            functions = enumerate(self.functions)
            return tuple(each.as_tool(f"functions[{place}]") for place, each in functions)
        if not self.tools:
            return ()
        tools, chosen = functions_of(self.tools), self.tool_choice
        if isinstance(chosen, AllowedToolsChoice):
            return only_allowed(tools, (each.function.name for each in chosen.allowed_tools.tools))
        return tools

    def _tool_choice(self) -> ToolChoice:
        chosen = self.function_call if self.functions else self.tool_choice
        if chosen is None:
            return _ANY_CHOICE
        if isinstance(chosen, AllowedToolsChoice):
            return ToolChoice(ToolMode(chosen.allowed_tools.mode))
        if isinstance(chosen, NamedToolChoice):
            return ToolChoice(ToolMode.NAMED, chosen.function.name)
        if isinstance(chosen, ChosenFunction):
            return ToolChoice(ToolMode.NAMED, chosen.name)
        return ToolChoice(ToolMode.REQUIRED if chosen == "any" else ToolMode(chosen))

    def check_together(self) -> None:
        """See the base class."""
        super().check_together()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
        if self.tool_choice not in _ASKS_NOTHING and not self.tools:
            raise InvalidRequest("'tool_choice' needs 'tools'", "tool_choice")
        if self.functions and self.tools:
            raise InvalidRequest("'tools' and 'functions' exclude each other", "functions")
        if self.function_call not in _ASKS_NOTHING and not self.functions:
            raise InvalidRequest("'function_call' needs 'functions'", "function_call")
