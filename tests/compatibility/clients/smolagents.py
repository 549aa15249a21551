"""smolagents: a tool-calling agent, a code agent, streams, structured output, and a stream that is
left."""

import gc
import sys
from typing import Any

from baton_fleet import LONG, MODEL, V1, aborted

sys.path.pop(0)  # this file has the client's name
from smolagents import ChatMessage, CodeAgent, OpenAIModel, ToolCallingAgent, tool

ASK = [ChatMessage(role="user", content=[{"type": "text", "text": "What is a lambda?"}])]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def make_model(**settings: Any) -> OpenAIModel:
    """The fleet's model with further fields of a request."""
    return OpenAIModel(MODEL, api_base=V1, api_key="none", **settings)


@tool
def weather(city: str) -> str:
    """
    The weather in a city.

    Args:
        city: The name of the city
    """
    return f"Sunny in {city}"


model = make_model(max_tokens=20)
answer = model.generate(ASK)
assert answer.content
assert answer.token_usage.output_tokens == 20
assert "".join(each.content or "" for each in model.generate_stream(ASK))
shape = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
assert (
    make_model(max_tokens=100).generate(ASK, response_format=shape).content.startswith('{"city":')
)

for is_streamed in (False, True):
    calling = ToolCallingAgent(
        tools=[weather],
        model=make_model(max_tokens=300, parallel_tool_calls=False, tool_choice="required"),
        max_steps=2,
        stream_outputs=is_streamed,
        verbosity_level=0,
    )
    calling.run("Call the weather in Rome")
    steps = [each for each in calling.memory.steps if getattr(each, "tool_calls", None)]
    names = {call.name for step in steps for call in step.tool_calls}
    assert names
    assert names <= {"weather", "final_answer"}, calling.memory.steps

coding = CodeAgent(
    tools=[weather],
    model=make_model(max_tokens=200),
    max_steps=2,
    use_structured_outputs_internally=True,
    verbosity_level=0,
)
coding.run("Print 1")
assert len(coding.memory.steps) >= 2

with aborted():
    stream = make_model(max_tokens=3000).generate_stream(
        [ChatMessage(role="user", content=[{"type": "text", "text": LONG}])]
    )
    next(stream)
    stream.close()
    gc.collect()  # the client below it closes its connection when it is freed
