"""Anthropic's client: messages, stream, tools, counting, and a prompt that is too long."""

import os
import sys

sys.path.pop(0)  # this file has the client's name
import anthropic

client = anthropic.Anthropic(base_url=os.environ["BATON_TEST_URL"], api_key="none")
ASK = [{"role": "user", "content": "What is a lambda?"}]
TOOL = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}},
}

answer = client.messages.create(model="demo_model", max_tokens=20, messages=ASK)
assert answer.content[0].text
with client.messages.stream(model="demo_model", max_tokens=20, messages=ASK) as stream:
    assert "".join(stream.text_stream)
called = client.messages.create(
    model="demo_model", max_tokens=200, messages=ASK, tools=[TOOL], tool_choice={"type": "any"}
)
use = called.content[-1]
assert use.name == "weather"
result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny"}
history = [
    *ASK,
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [result]},
]
assert client.messages.create(model="demo_model", max_tokens=20, messages=history, tools=[TOOL])
assert client.messages.count_tokens(model="demo_model", messages=ASK).input_tokens > 5
thinking = {"type": "enabled", "budget_tokens": 1024}
client.messages.create(model="demo_model", max_tokens=1100, messages=ASK, thinking=thinking)
try:
    client.messages.create(
        model="demo_model", max_tokens=20, messages=[{"role": "user", "content": "word " * 9000}]
    )
except anthropic.BadRequestError as error:
    message = error.message
else:
    message = "no error"
assert "prompt is too long" in message
