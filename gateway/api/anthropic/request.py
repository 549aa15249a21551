"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`.

The blocks of contents are in `gateway.api.anthropic.blocks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gateway.api.anthropic.blocks import Block, CacheControl, TextOrBlocks
from gateway.api.body_reader import RequestBody, Unsupported
from gateway.api.constraints.constraint import Constraint
from gateway.api.constraints.constraint_fields import ResponseFormat
from gateway.api.function_tools import MAX_TOOLS, Hint, ToolName
from gateway.api.generation_fields import (
    LIFETIMES_S,
    CacheSalt,
    GenerationFields,
    SamplingFields,
    generation_of,
)
from gateway.api.strict_model import StrictModel, bounded, first_error
from gateway.api.union_branches import LEFT_OUT, LIST, TEXT, TEXT_OR_LIST, LeftOut, by_type
from gateway.api.unknown_fields.ignorable_fields import ignorable
from gateway.http.anthropic_errors import ThreadsUnsupported


class MessageFields(StrictModel):
    """One turn, or a system message between turns. If the last message is the assistant's, the
    answer continues it."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, TEXT] | Annotated[list[Block], bounded, LIST], TEXT_OR_LIST]


class AnthropicFunction(StrictModel):
    """A function that the model may call. Its input is always streamed eagerly."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Hint = None
    defer_loading: Annotated[Any, ignorable(False)] = None
    allowed_callers: Annotated[Any, ignorable(["direct"])] = None


class OtherAnthropicTool(LeftOut):
    """A tool of another kind than a function."""

    usual = ("custom",)


AnthropicTool = Annotated[
    Annotated[AnthropicFunction, Tag("<custom>")] | Annotated[OtherAnthropicTool, LEFT_OUT],
    by_type("custom", usual="custom", others=LEFT_OUT),
]


class AnthropicToolChoice(StrictModel):
    """Which tools may or must be called; `name` is set for the type "tool" only."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(StrictModel):
    """Whether to think. A budget selects an effort; it is not enforced as a token limit."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1024)] | None = None
    display: Annotated[Any, ignorable("summarized")] = None


class OutputConfig(StrictModel):
    """How much to think, and the format of the text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: ResponseFormat | None = None


class CountTokensRequest(RequestBody):
    """A conversation whose prompt tokens are to be counted."""

    model: str
    messages: Annotated[list[MessageFields], Field(min_length=1), bounded]
    system: TextOrBlocks | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS), first_error] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None
    cache_salt: CacheSalt | None = None
    mcp_servers: Annotated[Any, ignorable([])] = None
    context_management: Annotated[Any, ignorable()] = None
    speed: Annotated[Any, ignorable("standard")] = None


class Metadata(StrictModel):
    """A label for the caller; no effect."""

    user_id: Annotated[str, Field(max_length=512)] | None = None


class MessagesRequest(SamplingFields, CountTokensRequest):
    """A conversation; the answer is the assistant's next message. `output_format` is an older name
    of `output_config.format`."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    metadata: Metadata | None = None
    service_tier: Hint = None
    container: Annotated[Any, ignorable()] = None
    inference_geo: Unsupported = None
    thread: Annotated[Any, Field(description="Not supported: nothing is stored.")] = None

    def check_together(self) -> None:
        """See the base class."""
        super().check_together()
        if self.thread is not None:
            raise ThreadsUnsupported

    @property
    def lifetime_s(self) -> int | None:
        """See the base class: the longest `ttl` of all."""
        parts: list[Any] = [self, *(self.tools or ()), *_blocks_within(self.system)]
        for message in self.messages:
            parts += _blocks_within(message.content)
        controls = (getattr(each, "cache_control", None) for each in parts)
        asked = [LIFETIMES_S[each.ttl] for each in controls if each is not None and each.ttl]
        return max(asked, default=None)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """See the base class."""
        found = list(super().constraints)
        if self.output_config is not None and self.output_config.format is not None:
            found += self.output_config.format.constraints("output_config.format")
        if self.output_format is not None:
            found += self.output_format.constraints("output_format")
        return tuple(found)

    @property
    def generation(self) -> GenerationFields:
        """How to sample and when to stop, in the form that all endpoints share."""
        return generation_of(self, self.model, self.stream)


def _blocks_within(content: Any) -> Iterator[Any]:
    """The blocks of a content, and those that results and documents among them hold."""
    for block in content if isinstance(content, list) else ():
        yield block
        yield from _blocks_within(getattr(block, "content", None))
        yield from _blocks_within(getattr(getattr(block, "source", None), "content", None))
