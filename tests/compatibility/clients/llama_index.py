"""llama-index: chat and stream through OpenAILike."""

import os
import sys

sys.path.pop(0)  # this file has the client's name
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model="demo_model",
    api_base=f"{os.environ['BATON_TEST_URL']}/v1",
    api_key="none",
    is_chat_model=True,
    context_window=4096,
    max_tokens=20,
)
asked = [ChatMessage(role="user", content="What is a lambda?")]
assert llm.chat(asked).message.content
assert "".join(each.delta or "" for each in llm.stream_chat(asked))
assert llm.complete("What is a lambda?").text
