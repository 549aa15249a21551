"""openai-agents: a session of several turns, tools, and a stream, on both of OpenAI's APIs."""

import asyncio
import os
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    StopAtTools,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url=f"{os.environ['BATON_TEST_URL']}/v1", api_key="none")


class Answer(BaseModel):
    """An answer that ends soon, whatever the model."""

    word: Literal["yes", "no"]


@function_tool
def add(a: Literal["1", "2"], b: Literal["1", "2"]) -> str:
    """Add two numbers."""
    return str(int(a) + int(b))


async def remembered(agent: Agent) -> None:
    """The router keeps the conversation, and the client sends only what is new."""
    previous, lengths = None, []
    for question in ("What is a lambda?", "And a closure?", "And a class?"):
        result = await Runner.run(agent, question, previous_response_id=previous)
        previous = result.last_response_id
        lengths.append(result.raw_responses[-1].usage.input_tokens)
    assert lengths == sorted(set(lengths))
    items = await CLIENT.responses.input_items.list(previous, order="asc")
    assert [each.role for each in items.data] == ["user", "assistant"] * 2 + ["user"]


async def main() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model="demo_model", openai_client=CLIENT)
        settings = ModelSettings(max_tokens=500)
        agent = Agent("short", "Be short", model=model, output_type=Answer, model_settings=settings)
        session = SQLiteSession(kind.__name__)
        for question in ("What is a lambda?", "And a closure?"):
            result = await Runner.run(agent, question, session=session)
            assert result.final_output.word in ("yes", "no")
        assert len(await session.get_items()) >= 4
        calling = Agent(
            "adds",
            "Add",
            model=model,
            tools=[add],
            tool_use_behavior=StopAtTools(stop_at_tool_names=["add"]),
            model_settings=ModelSettings(
                max_tokens=500, tool_choice="required", parallel_tool_calls=False
            ),
        )
        await Runner.run(calling, "Add 1 and 2")
        if kind is OpenAIResponsesModel:
            await remembered(agent)
        streamed = Runner.run_streamed(agent, "What is a lambda?")
        events = [event async for event in streamed.stream_events()]
        assert events
        assert streamed.final_output


asyncio.run(main())
