"""litellm: chat, stream, tools, and its own error for a prompt that is too long."""

import os
import sys

sys.path.pop(0)  # this file has the client's name
import litellm

BASE = {"api_base": f"{os.environ['BATON_TEST_URL']}/v1", "api_key": "none"}
MODEL = "openai/demo_model"
ASK = [{"role": "user", "content": "What is a lambda?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}},
    },
}

answer = litellm.completion(model=MODEL, messages=ASK, max_tokens=20, **BASE)
assert answer.choices[0].message.content
assert answer.usage.completion_tokens == 20
chunks = list(litellm.completion(model=MODEL, messages=ASK, max_tokens=20, stream=True, **BASE))
assert "".join(each.choices[0].delta.content or "" for each in chunks)
called = litellm.completion(
    model=MODEL, messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=200, **BASE
)
assert called.choices[0].message.tool_calls[0].function.name == "weather"
for provider, base in ((MODEL, BASE), ("hosted_vllm/demo_model", BASE)):
    try:
        litellm.completion(
            model=provider, messages=[{"role": "user", "content": "word " * 9000}], **base
        )
    except litellm.ContextWindowExceededError:
        continue
    raise AssertionError("no ContextWindowExceededError")
anthropic = {"api_base": os.environ["BATON_TEST_URL"], "api_key": "none"}
answer = litellm.completion(model="anthropic/demo_model", messages=ASK, max_tokens=20, **anthropic)
assert answer.choices[0].message.content
for messages, most in (([{"role": "user", "content": "word " * 9000}], 20), (ASK, 5000)):
    try:
        litellm.completion(
            model="anthropic/demo_model", messages=messages, max_tokens=most, **anthropic
        )
    except litellm.ContextWindowExceededError:
        continue
    raise AssertionError("no ContextWindowExceededError")
