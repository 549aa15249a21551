"""llm on both of OpenAI's APIs: a conversation on its command line and Ctrl-C during an answer; its
library with stream, schema and a chain of tool calls."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from baton_fleet import MODEL, V1, aborted

sys.path.pop(0)  # this file has the client's name
import llm
from pydantic import BaseModel

FOLDER = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = FOLDER.name
SHARED = {"model_name": MODEL, "api_base": V1, "supports_tools": True, "supports_schema": True}
WORDS = {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 700}
LONG = {"type": "object", "properties": {"words": WORDS}, "required": ["words"]}
NAMES = ("baton-chat", "baton-responses")
Path(FOLDER.name, "extra-openai-models.yaml").write_text(
    json.dumps([{"model_id": each, "responses": "responses" in each, **SHARED} for each in NAMES])
)


class City(BaseModel):
    """A city."""

    name: Literal["Rome", "Oslo"]
    is_capital: bool


def command_line(name: str) -> None:
    """Two questions, the second of which continues the first."""
    for more in ((), ("--continue",)):
        command = [
            "llm",
            "prompt",
            "-m",
            name,
            "-o",
            "max_tokens",
            "20",
            *more,
            "What is a lambda?",
        ]
        assert subprocess.check_output(command, text=True).strip()
    logged = json.loads(subprocess.check_output(["llm", "logs", "--json", "-n", "1"]))
    assert logged[0]["response"], logged
    if name == "baton-chat":  # over Responses, the client sees no usage of an incomplete answer
        assert logged[0]["output_tokens"] == 20, logged


def library(name: str) -> None:
    """Conversation, schema, and tools."""
    model = llm.get_model(name)
    conversation = model.conversation()
    for question in ("What is a lambda?", "And a closure?"):
        assert "".join(conversation.prompt(question, max_tokens=20))
    City.model_validate_json(model.prompt("Name a city", schema=City, max_tokens=300).text())

    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather in a city"""
        return f"Sunny in {city}"

    chain = model.conversation().chain(
        "Call the weather in Rome", tools=[weather], chain_limit=2, options={"max_tokens": 60}
    )
    try:
        chain.text()
    except ValueError as error:  # the model calls again and again
        if "Chain limit" not in str(error):
            raise


def interrupt(name: str) -> None:
    """Ctrl-C while the answer is written."""
    with aborted():
        command = ["llm", "prompt", "-m", name, "--schema", json.dumps(LONG), "What is a lambda?"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as asked:
            assert asked.stdout is not None
            assert asked.stdout.read(1)
            asked.send_signal(signal.SIGINT)


for name in NAMES:
    command_line(name)
    library(name)
    interrupt(name)
FOLDER.cleanup()
