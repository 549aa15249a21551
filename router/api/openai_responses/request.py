"""The body of `POST /v1/responses`.

Responses are not stored: fields that refer to a stored response are refused by name, and the
client sends the whole conversation as `input` each time.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from protocol.errors import InvalidRequest
from router.api.openai.chat_request import Effort
from router.api.request_fields import (
    GenerationFields,
    LogprobsCount,
    RequestBody,
    StreamOptions,
    StrictModel,
    Unsupported,
    only,
)
from router.api.structured_outputs import JsonObjectFormat, JsonSchema, JsonSchemaFormat, TextFormat
from router.api.tool_fields import MAX_TOOLS, ToolName

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
_Status = Literal["in_progress", "completed", "incomplete"]
_Label = Annotated[str, Field(max_length=512)]


class TextItemPart(StrictModel):
    """A piece of the user's text or of an earlier answer. Its log-probabilities are ignored."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[Any, only([])] = None
    logprobs: list[Any] | None = None


def _content_shape(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<parts>"


_ItemContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextItemPart], Tag("<parts>")],
    Discriminator(_content_shape),
]


class MessageItem(StrictModel):
    """A message of the conversation so far."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _ItemContent
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(StrictModel):
    """A call that the assistant made earlier; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None


class FunctionOutputItem(StrictModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: _ItemContent
    id: str | None = None
    status: _Status | None = None


class ReasoningPart(StrictModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """The assistant's earlier reasoning; the summary is ignored if there is content."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: Unsupported = None
    status: _Status | None = None


def _item_kind(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else "message"
    return f"<{kind}>"


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        _item_kind,
        custom_error_type="unsupported",
        custom_error_message="its type must be 'message', 'function_call', "
        "'function_call_output' or 'reasoning'",
    ),
]


def _input_shape(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<items>"


class ResponseTool(StrictModel):
    """A function that the model may call; no other tools are supported."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(StrictModel):
    """The one function that must be called."""

    type: Literal["function"]
    name: ToolName


def _choice_shape(value: Any) -> str:
    return "<mode>" if isinstance(value, str) else "<named>"


class ReasoningConfig(StrictModel):
    """How much to think. There are no summaries: the answer contains the reasoning itself."""

    effort: Effort | None = None
    summary: Annotated[Any, only("auto")] = None
    generate_summary: Unsupported = None


class SchemaFormatFields(JsonSchema):
    """JSON that always conforms to the schema."""

    type: Literal["json_schema"]

    @property
    def as_response_format(self) -> JsonSchemaFormat:
        """The same format as a field of chat completions."""
        named = {"name": self.name, "schema": self.schema_, "strict": self.strict}
        schema = JsonSchema.model_validate(named)
        return JsonSchemaFormat(type="json_schema", json_schema=schema)


class TextConfig(StrictModel):
    """The format of the text."""

    format: (
        Annotated[
            TextFormat | JsonObjectFormat | SchemaFormatFields,
            Discriminator("type"),
        ]
        | None
    ) = None
    verbosity: Annotated[Any, only("medium")] = None


class ResponsesRequest(RequestBody):
    """A conversation as items; the answer is the assistant's next turn."""

    model: str
    input: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[InputItem], Field(min_length=1), Tag("<items>")],
        Discriminator(_input_shape),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
            | Annotated[ChosenTool, Tag("<named>")],
            Discriminator(_choice_shape),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    metadata: Annotated[dict[str, _Label], Field(max_length=MAX_METADATA)] | None = None
    user: _Label | None = None
    safety_identifier: _Label | None = None
    prompt_cache_key: _Label | None = None
    prompt_cache_retention: Annotated[Any, only("in_memory")] = None
    truncation: Literal["auto", "disabled"] | None = None
    store: Annotated[Any, only(False)] = None
    background: Annotated[Any, only(False)] = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    max_tool_calls: Unsupported = None
    top_logprobs: LogprobsCount | None = None

    def check_together(self) -> None:
        """See the base class."""
        if self.stream_options is not None and (
            not self.stream or self.stream_options.include_usage is not None
        ):
            raise InvalidRequest(
                "'stream_options' has 'include_obfuscation' alone, in streams", "stream_options"
            )
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise InvalidRequest("'tool_choice' needs 'tools'", "tool_choice")
        if self.top_logprobs and not self.include:
            raise InvalidRequest(
                f"'top_logprobs' needs 'include' to have '{LOGPROBS}'", "top_logprobs"
            )

    @property
    def logprobs_count(self) -> int | None:
        """Number of alternatives to report per token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.include else None

    @property
    def response_format(self) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
        """The format of the text, as a field of chat completions."""
        wanted = self.text.format if self.text else None
        return wanted.as_response_format if isinstance(wanted, SchemaFormatFields) else wanted

    @property
    def generation(self) -> GenerationFields:
        """How to sample and when to stop, in the form that all endpoints share."""
        return GenerationFields(
            model=self.model,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            stream_options=StreamOptions(include_usage=True) if self.stream else None,
        )
