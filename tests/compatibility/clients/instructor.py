"""instructor: tools, JSON schema and JSON modes."""

import os
import sys

sys.path.pop(0)  # this file has the client's name
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{os.environ['BATON_TEST_URL']}/v1", api_key="none")


class City(BaseModel):
    """A city."""

    name: Literal["Rome", "Oslo"]
    is_capital: bool


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    wrapped = instructor.from_openai(client, mode=mode)
    city = wrapped.chat.completions.create(
        model="demo_model",
        response_model=City,
        messages=[{"role": "user", "content": "Name a city"}],
        max_tokens=500,
    )
    assert city.name in ("Rome", "Oslo")
