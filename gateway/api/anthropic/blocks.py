"""The blocks of messages' contents.

The model reads text. Blocks with text become text, calls of the service's own tools become ordinary
calls, and images and files are refused by name. Blocks that no other service can read (encrypted
thoughts, changes of tools) are left out and named. `cache_control` is accepted everywhere: every
prefix is cached, and a `ttl` is a hint that the client will send the prompt again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gateway.api.strict_model import StrictModel, bounded
from gateway.api.tool_result_text import has_unreadable, text_in
from gateway.api.union_branches import (
    LEFT_OUT,
    LIST,
    REFUSED,
    TEXT,
    TEXT_OR_LIST,
    LeftOut,
    Refused,
    by_type,
)
from gateway.api.unknown_fields.ignorable_fields import ignorable, ignorable_if

SERVER_RESULTS = (
    "web_search_tool_result", "web_fetch_tool_result", "advisor_tool_result",
    "code_execution_tool_result", "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result", "tool_search_tool_result", "mcp_tool_result",
)  # fmt: skip
_FILES = ("image", "file", "audio", "video")
_TEXTS = ("text", "document", "search_result", "tool_reference", "compaction")


class CacheControl(StrictModel):
    """Asks to cache the prompt up to this point. Prompts are always cached; a `ttl` protects the
    whole prompt for that time."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(StrictModel):
    cache_control: CacheControl | None = None


class TextBlockFields(_Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Annotated[Any, ignorable([])] = None


TextList = Annotated[
    list[
        Annotated[
            Annotated[TextBlockFields, Tag("<text>")] | Annotated[Refused, REFUSED],
            by_type("text", usual="text", others=REFUSED),
        ]
    ],
    bounded,
]
TextOrBlocks = Annotated[Annotated[str, TEXT] | Annotated[TextList, LIST], TEXT_OR_LIST]


class PlainSource(StrictModel):
    """The text of a document."""

    type: Literal["text"]
    data: str
    media_type: Literal["text/plain"] | None = None

    @property
    def text(self) -> str:
        """The text."""
        return self.data


class BlocksSource(StrictModel):
    """The text of a document in blocks."""

    type: Literal["content"]
    content: TextOrBlocks

    @property
    def text(self) -> str:
        """The text, with a line for each block."""
        return _joined(self.content)


class DocumentFields(_Block):
    """A document of text; the model sees its title and its context before it. Files, as PDF, are
    refused."""

    type: Literal["document"]
    source: Annotated[
        Annotated[PlainSource, Tag("<text>")]
        | Annotated[BlocksSource, Tag("<content>")]
        | Annotated[Refused, REFUSED],
        by_type("text", "content", usual="text", others=REFUSED),
    ]
    title: str | None = None
    context: str | None = None
    citations: Annotated[Any, ignorable({"enabled": False})] = None

    @property
    def text(self) -> str:
        """What the model sees."""
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


class SearchResultFields(_Block):
    """A result of the client's search; the model sees its title and its source before it."""

    type: Literal["search_result"]
    source: str
    title: str
    content: TextList
    citations: Annotated[Any, ignorable({"enabled": False})] = None

    @property
    def text(self) -> str:
        """What the model sees."""
        return "\n".join(filter(None, (self.title, self.source, _joined(self.content))))


class ToolReferenceFields(_Block):
    """The name of a tool that a search for tools found. The model always sees all tools."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """What the model sees."""
        return self.tool_name


class CompactionFields(_Block):
    """A summary of the earlier conversation; the model sees it."""

    type: Literal["compaction"]
    content: str | None = None
    encrypted_content: Annotated[Any, ignorable()] = None

    @property
    def text(self) -> str:
        """What the model sees."""
        return self.content or ""


class ServerResultFields(_Block):
    """The result of another service's tool. The model sees its text."""

    type: Annotated[str, Field(max_length=256)]
    tool_use_id: str
    content: Annotated[
        Any, ignorable_if(has_unreadable, "Text; its other fields are ignored and named.")
    ] = None
    is_error: bool | None = None
    caller: Annotated[Any, ignorable({"type": "direct"})] = None

    @property
    def text(self) -> str:
        """What the model sees."""
        return text_in(self.content)


class OtherBlock(LeftOut):
    """A block of any other type. It is left out and named."""

    usual = (*_TEXTS, "tool_use", "tool_result", "thinking")


_TextLike = (
    Annotated[TextBlockFields, Tag("<text>")]
    | Annotated[DocumentFields, Tag("<document>")]
    | Annotated[SearchResultFields, Tag("<search_result>")]
    | Annotated[ToolReferenceFields, Tag("<tool_reference>")]
    | Annotated[CompactionFields, Tag("<compaction>")]
)
ResultBlock = Annotated[
    _TextLike
    | Annotated[ServerResultFields, Tag("<server_tool_result>")]
    | Annotated[Refused, REFUSED]
    | Annotated[OtherBlock, LEFT_OUT],
    by_type(
        *_TEXTS,
        usual="text",
        others=LEFT_OUT,
        refused=_FILES,
        same={"server_tool_result": SERVER_RESULTS},
    ),
]


class ToolUseFields(_Block):
    """A call that the assistant made earlier."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Annotated[Any, ignorable({"type": "direct"})] = None


class ToolResultFields(_Block):
    """The result of a call. With `is_error` the model sees the prefix "Error: " before it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[
            Annotated[str, TEXT] | Annotated[list[ResultBlock], bounded, LIST],
            TEXT_OR_LIST,
        ]
        | None
    ) = None
    is_error: bool | None = None


class ServerUseFields(_Block):
    """A call that another service's assistant made, of a tool of that service."""

    type: Literal["server_tool_use", "mcp_tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Annotated[Any, ignorable({"type": "direct"})] = None


class ThinkingFields(StrictModel):
    """The assistant's earlier reasoning; `signature` is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = Annotated[
    _TextLike
    | Annotated[ToolUseFields, Tag("<tool_use>")]
    | Annotated[ToolResultFields, Tag("<tool_result>")]
    | Annotated[ServerUseFields, Tag("<server_tool_use>")]
    | Annotated[ServerResultFields, Tag("<server_tool_result>")]
    | Annotated[ThinkingFields, Tag("<thinking>")]
    | Annotated[Refused, REFUSED]
    | Annotated[OtherBlock, LEFT_OUT],
    by_type(
        *_TEXTS,
        "tool_use",
        "tool_result",
        "thinking",
        usual="text",
        others=LEFT_OUT,
        refused=_FILES,
        same={
            "server_tool_use": ("server_tool_use", "mcp_tool_use"),
            "server_tool_result": SERVER_RESULTS,
        },
    ),
]
TextLike = (
    TextBlockFields, DocumentFields, SearchResultFields, ToolReferenceFields, CompactionFields
)  # fmt: skip
"""Blocks that the model sees as text; the name of the property that holds it."""


def _joined(content: str | list[TextBlockFields | Refused]) -> str:
    return content if isinstance(content, str) else "\n".join(each.text for each in content)
