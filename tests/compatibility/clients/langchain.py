"""langchain-openai: chat, stream, tools, structured output, and a prompt that is too long."""

import os
import sys

sys.path.pop(0)  # this file has the client's name
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL = f"{os.environ['BATON_TEST_URL']}/v1"
chat = ChatOpenAI(model="demo_model", base_url=URL, api_key="none", max_tokens=200)
assert chat.invoke("What is a lambda?").content
assert "".join(str(each.content) for each in chat.stream("What is a lambda?"))


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


bound = chat.bind_tools([add], tool_choice="required")
answer = bound.invoke("Add 1 and 2")
assert isinstance(answer, AIMessage)
call = answer.tool_calls[0]
assert call["name"] == "add"
history = [HumanMessage("Add"), answer, ToolMessage("3", tool_call_id=call["id"])]
assert chat.bind_tools([add]).invoke(history) is not None


class Answer(BaseModel):
    """A small answer."""

    kind: str = Field(pattern="^(a|b)$")
    tags: set[str] = Field(max_length=1)


for method in ("json_schema", "function_calling"):
    made = chat.with_structured_output(Answer, method=method, strict=False).invoke("Answer")
    assert made is None or made.kind in "ab"
responses = ChatOpenAI(
    model="demo_model", base_url=URL, api_key="none", max_tokens=50, use_responses_api=True
)
assert responses.invoke("What is a lambda?").content
try:
    chat.invoke("word " * 9000)
except ContextOverflowError:
    is_recognised = True
else:
    is_recognised = False
assert is_recognised
