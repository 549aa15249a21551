"""pydantic-ai: structured output and tools over chat completions and responses."""

import os
import sys

sys.path.pop(0)  # this file has the client's name
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=f"{os.environ['BATON_TEST_URL']}/v1", api_key="none")


class City(BaseModel):
    """A city."""

    name: Literal["Rome", "Oslo"]


for model in (
    OpenAIChatModel("demo_model", provider=PROVIDER),
    OpenAIResponsesModel("demo_model", provider=PROVIDER),
):
    text = Agent(model).run_sync("What is a lambda?", model_settings={"max_tokens": 30})
    assert text.output
    for output in (City, NativeOutput(City)):
        found = Agent(model, output_type=output).run_sync("Name a city")
        assert found.output.name in ("Rome", "Oslo")
