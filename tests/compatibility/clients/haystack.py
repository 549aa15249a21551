"""haystack on both of OpenAI's APIs: generators with streams and structured output, an agent with a
tool, and a stream that is left."""

import asyncio
import contextlib
import gc
import sys
from typing import Literal

from baton_fleet import LONG, MODEL, V1, aborted

sys.path.pop(0)  # this file has the client's name
from typing import Annotated, Any

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel

ASK = [ChatMessage.from_user("What is a lambda?")]


class City(BaseModel):
    """A city."""

    name: Literal["Rome", "Oslo"]
    is_capital: bool


@tool
def weather(city: Annotated[Literal["Rome", "Oslo"], "The city's name"]) -> str:
    """The weather in a city."""
    return f"Sunny in {city}"


def make(kind: type, **settings: Any) -> Any:
    """A generator with further fields of a request."""
    settings.setdefault("max_tokens", 300)
    if kind is OpenAIResponsesChatGenerator:
        settings["max_output_tokens"] = settings.pop("max_tokens")
        if shape := settings.pop("response_format", None):
            settings["text_format"] = shape
    return kind(
        model=MODEL,
        api_base_url=V1,
        api_key=Secret.from_token("none"),
        generation_kwargs=settings,
        max_retries=0,
        tools_strict=True,
    )


def leave(chunk: StreamingChunk) -> None:
    """Ends the request at its first chunk of text."""
    if chunk.content:
        raise InterruptedError


for kind in (OpenAIChatGenerator, OpenAIResponsesChatGenerator):
    short = make(kind, max_tokens=20)
    assert short.run(ASK)["replies"][0].text
    chunks: list[StreamingChunk] = []
    reply = short.run(ASK, streaming_callback=chunks.append)["replies"][0]
    assert "".join(each.content for each in chunks) == reply.text
    assert asyncio.run(short.run_async([*ASK, reply, *ASK]))["replies"][0].text
    shaped = make(kind, response_format=City).run(ASK)["replies"][0]
    City.model_validate_json(shaped.text)
    for callback in (None, chunks.append):
        calling = make(kind, tool_choice="required", parallel_tool_calls=False)
        agent = Agent(chat_generator=calling, tools=[weather], max_agent_steps=2)
        messages = agent.run(ASK, streaming_callback=callback)["messages"]
        assert [each.role.value for each in messages][-2:] == ["assistant", "tool"], messages
        result = messages[-1].tool_call_result
        assert result.result.startswith("Sunny"), result
    with aborted():
        with contextlib.suppress(InterruptedError):
            make(kind, max_tokens=3000).run([ChatMessage.from_user(LONG)], streaming_callback=leave)
        gc.collect()  # the client below it closes its connection when it is freed
