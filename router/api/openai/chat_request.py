"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import Annotated, Any, Literal

from msgspec.structs import replace
from pydantic import Discriminator, Field, Tag

from protocol.errors import InvalidRequest
from router.api.branches import LIST, REFUSED, TEXT, TEXT_OR_LIST, Refused, by_type
from router.api.generation_fields import GenerationFields, LogprobsCount
from router.api.request_fields import Unsupported, only
from router.api.strict_model import StrictModel, bounded, first_error
from router.api.tool_fields import (
    MAX_TOOLS,
    AllowedToolsChoice,
    CalledFunction,
    ChosenFunction,
    FunctionFields,
    Hint,
    MessageToolCall,
    NamedToolChoice,
    ToolFields,
    functions_of,
    only_allowed,
    tool_choice_shape,
)
from router.api.unknown_fields.findings import ignorable
from router.chat.conversation import Conversation, Message, Tool, ToolChoice, ToolMode

NO_TEMPLATES = (
    "a template is a program, which no sandbox keeps from running for as long as it likes in a "
    "router that others use, too; 'chat_template_kwargs' reaches the checkpoint's own, and "
    "/v1/completions takes a prompt that was rendered elsewhere"
)

_ANY_CHOICE = ToolChoice()
_ASKS_NOTHING = (None, "none", "auto")
"""Choices of tools that mean the same as none at all where there are no tools."""
_ASKING_ROLES = ("system", "developer", "user")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(StrictModel):
    """A piece of a message's content; text is the only kind supported. It may have the names that
    /v1/responses has for it."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    cache_control: Hint = None


class RefusalPart(StrictModel):
    """A piece of an earlier answer that says why there is none; the model sees it as text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What was said."""
        return self.refusal


_Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[Refused, REFUSED],
    by_type(
        "text",
        "refusal",
        usual="text",
        others=REFUSED,
        same={"text": ("input_text", "output_text")},
    ),
]
_Content = Annotated[
    Annotated[str, TEXT] | Annotated[list[_Part], bounded, LIST],
    TEXT_OR_LIST,
]


class ChatMessage(StrictModel):
    """One message; the template also sees `name`, `tool_call_id` and `reasoning_content`.

    `reasoning` is vLLM's name for `reasoning_content`. `parsed` is ignored: OpenAI's client adds
    its parsed form of an answer's content, and sends it back with the answer. A `refusal` is text
    of the assistant.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: _Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[MessageToolCall], bounded] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    parsed: Any = None
    refusal: str | None = None
    audio: Annotated[Any, ignorable()] = None
    annotations: Annotated[Any, ignorable([])] = None
    function_call: CalledFunction | None = None
    cache_control: Hint = None

    def as_message(self, place: int) -> Message:
        """As a `Message`; without a template that lays them out, text parts become lines of one
        text. Raises InvalidRequest."""
        param = f"messages[{place}]"
        calls = tuple(
            [
                call.as_call(_made_id(place, index))
                for index, call in enumerate(self.tool_calls or ())
            ]
        )
        if self.function_call is not None:
            calls = (*calls, self.function_call.as_call(_made_id(place)))
        if calls and self.role != "assistant":
            raise InvalidRequest(f"'{param}.tool_calls' is of the assistant alone", param)
        text, parts = self._text(param)
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if self.role == "function":
            return Message("tool", text, self.name)
        return Message(self.role, text, self.name, thoughts, calls, self.tool_call_id, parts)

    def _text(self, param: str) -> tuple[str, tuple[str, ...]]:
        """The content as one text, and as parts if there are several. An answer may be empty, and
        so may a result. Raises InvalidRequest."""
        content = self.content
        if not content and self.role in _ASKING_ROLES and not isinstance(content, str):
            what = "is required" if content is None else "must not be empty"
            raise InvalidRequest(f"'{param}.content' {what}", f"{param}.content")
        if self.refusal is None and isinstance(content, str):
            return content, ()
        if self.refusal is not None and self.role != "assistant":
            raise InvalidRequest(f"'{param}.refusal' is of the assistant alone", f"{param}.refusal")
        texts = [content] if isinstance(content, str) else [part.text for part in content or ()]
        if self.refusal is not None:
            texts = [*filter(None, texts), self.refusal]
        return "\n".join(texts), tuple(texts) if len(texts) > 1 else ()


def messages_of(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """The messages of a conversation. The result of a legacy `function_call` gets the id that the
    call before it has, and another result without an id that of the first call without a result.
    Raises InvalidRequest."""
    made: list[Message] = []
    called: deque[str] = deque()
    answered: set[str] = set()
    call_place = 0
    for place, each in enumerate(messages):
        message = each.as_message(place)
        if each.role == "function":
            message = replace(message, tool_call_id=_made_id(call_place))
        elif each.function_call is not None:
            call_place = place
        elif message.tool_calls:
            called = deque(call.id for call in message.tool_calls)
        elif message.tool_call_id:
            answered.add(message.tool_call_id)
        elif each.role == "tool" and (call_id := _first_without_result(called, answered)):
            message = replace(message, tool_call_id=call_id)
        made.append(message)
    return tuple(made)


def _first_without_result(called: deque[str], answered: Container[str]) -> str | None:
    """The first of the calls that are not answered, which is taken from them."""
    while called:
        call_id = called.popleft()
        if call_id not in answered:
            return call_id
    return None


def _made_id(place: int, index: int = 0) -> str:
    """An id for a call of a message that has none; of nine characters, as Mistral's templates want
    it, unless the message has several."""
    return f"call{place:05}{index or ''}"


class ChatRequest(GenerationFields):
    """A conversation; the answer is the assistant's next message, `n` times."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), bounded]
    logprobs: bool | None = None
    top_logprobs: LogprobsCount | None = None
    tools: Annotated[list[ToolFields], Field(max_length=MAX_TOOLS), first_error] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
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
    prompt_cache_retention: Hint = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    chat_template: Annotated[Any, only(why=NO_TEMPLATES)] = None

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
            continue_final_message=bool(self.continue_final_message),
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
        return ToolChoice(ToolMode(chosen))

    def check_together(self) -> None:
        """See the base class."""
        super().check_together()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "'continue_final_message' and 'add_generation_prompt' exclude each other",
                "continue_final_message",
            )
        if self.tool_choice not in _ASKS_NOTHING and not self.tools:
            raise InvalidRequest("'tool_choice' needs 'tools'", "tool_choice")
        if self.functions and self.tools:
            raise InvalidRequest("'tools' and 'functions' exclude each other", "functions")
        if self.function_call not in _ASKS_NOTHING and not self.functions:
            raise InvalidRequest("'function_call' needs 'functions'", "function_call")
