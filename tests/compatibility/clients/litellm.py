"""litellm: chat, stream, tools, and its own error for a prompt that is too long. Also its proxy in
front of the fleet: the same for OpenAI's client, and a stream that is left."""

import os
import sys
import tempfile
from pathlib import Path

from baton_fleet import FLEET, aborted, free_port, proxy

sys.path.pop(0)  # this file has the client's name
import litellm
import openai

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


START_S = 120.0
PROXY = """\
model_list:
- model_name: chat
  litellm_params: {{model: hosted_vllm/demo_model, api_base: "{fleet}/v1", api_key: none}}
- model_name: messages
  litellm_params: {{model: anthropic/demo_model, api_base: "{fleet}", api_key: none}}
"""


def converse(client: openai.OpenAI, model: str) -> None:
    """An answer, a stream with its usage, a call, a prompt that is too long, and a stream that the
    client leaves."""
    answer = client.chat.completions.create(model=model, messages=ASK, max_tokens=20)
    assert answer.usage.completion_tokens == 20
    stream = client.chat.completions.create(
        model=model,
        messages=ASK,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    usages = [each.usage for each in stream if each.usage is not None]
    assert [each.completion_tokens for each in usages] == [20]
    called = client.chat.completions.create(
        model=model, messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=200
    )
    assert called.choices[0].message.tool_calls[0].function.name == "weather"
    assert "ContextWindowExceededError" in refusal_of_a_long_prompt(client, model)
    with aborted():
        left = client.chat.completions.create(
            model=model,
            messages=ASK,
            stream=True,
            max_tokens=3500,
            extra_body={"min_tokens": 3000},
        )
        next(iter(left))
        left.close()


def refusal_of_a_long_prompt(client: openai.OpenAI, model: str) -> str:
    """The error that the client shows."""
    try:
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "word " * 9000}]
        )
    except openai.BadRequestError as error:
        return str(error)
    raise AssertionError("no error")


port = free_port()
with tempfile.TemporaryDirectory() as folder:
    config = Path(folder) / "config.yaml"
    config.write_text(PROXY.format(fleet=FLEET))
    command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {
        **os.environ,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    with proxy(command, port, "/health/liveliness", START_S, environment) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        for name in ("chat", "messages"):
            converse(client, name)
