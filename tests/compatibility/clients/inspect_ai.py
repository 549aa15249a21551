"""inspect-ai: a small evaluation of an agent with a tool, structured output, and a generation that
is cancelled, over both of OpenAI's APIs and Anthropic's."""

import asyncio
import os
import sys
import tempfile

from baton_fleet import FLEET, LONG, MODEL, V1, aborted

sys.path.pop(0)  # this file has the client's name
from inspect_ai import Task, task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import ToolFunction, tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

os.environ |= {"BATON_BASE_URL": V1, "BATON_API_KEY": "none", "ANTHROPIC_BASE_URL": FLEET}
MODELS = {
    "chat": (f"openai-api/baton/{MODEL}", {}),
    "responses": (f"openai-api/baton/{MODEL}", {"responses_api": True}),
    "anthropic": (f"anthropic/{MODEL}", {}),
}


class City(BaseModel):
    """A city."""

    is_capital: bool


@tool
def weather():
    async def execute(is_tomorrow: bool) -> str:
        """
        The weather.

        Args:
            is_tomorrow: Whether it is tomorrow's
        """
        return f"Sunny, {is_tomorrow}"

    return execute


@task
def forecast() -> Task:
    """One turn that calls the tool, and one that answers."""
    return Task(
        dataset=[Sample(input=f"The weather in {city}?", target="e") for city in ("Rome", "Oslo")],
        solver=[
            use_tools(weather(), tool_choice=ToolFunction("weather")),
            generate(tool_calls="single"),
            use_tools(weather(), tool_choice="none"),
            generate(max_tokens=20),
        ],
        scorer=includes(),
    )


async def shaped(name: str, **arguments: object) -> None:
    """Structured output, and a generation that is cancelled."""
    model = get_model(name, **arguments)
    shape = ResponseSchema(name="city", json_schema=json_schema(City))
    answer = await model.generate(
        "Name a city", config=GenerateConfig(response_schema=shape, max_tokens=300)
    )
    City.model_validate_json(answer.completion)
    with aborted():
        asked = asyncio.create_task(model.generate(LONG, config=GenerateConfig(max_tokens=3000)))
        await asyncio.sleep(0.1)
        asked.cancel()
        await asyncio.wait([asked])


for kind, (name, arguments) in MODELS.items():
    with tempfile.TemporaryDirectory() as folder:
        (log,) = evaluate(
            forecast(),
            model=name,
            model_args=arguments,
            log_dir=folder,
            display="none",
            max_tokens=300,
            parallel_tool_calls=False,
            max_retries=0,
        )
        assert log.status == "success", (kind, log.error)
        for sample in log.samples:
            roles = [each.role for each in sample.messages]
            assert roles == ["user", "assistant", "tool", "assistant"], (kind, sample.messages)
            assert not sample.messages[2].error, (kind, sample.messages[2])
    asyncio.run(shaped(name, **arguments))
