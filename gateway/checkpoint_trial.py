"""The child process in which a router first reads its checkpoint, see `checkpoint.trial`.

It does what the router will do with the files, and renders and encodes a sample conversation.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoint.trial import limit_this_process, run_steps
from checkpoint.vocabularies.tokenizer_json import tokenizer_file
from gateway.api.checkpoint_defaults import load_sampling_defaults
from gateway.chat.markup import find_markup
from gateway.grammars.grammar_checker import GrammarChecker
from gateway.text.chat_template import ChatTemplate
from gateway.text.checkpoint_texts import chat_template_file, load_chat_templates
from gateway.text.rendering_budget import BudgetExceeded
from gateway.text.tokenizer import Tokenizer
from protocol.errors import InvalidRequest, ModelLoadError

_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Bern"}},
}
_SAMPLE: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the weather in Bern? \N{SNOWFLAKE}\n\n  1234567890"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "snow", "tool_call_id": "call12345"},
    {"role": "assistant", "content": "It snows."},
    {"role": "user", "content": "Thanks!"},
]
_PLAIN = [_SAMPLE[1], _SAMPLE[4], _SAMPLE[5]]


def main(argv: Sequence[str]) -> int:
    """Read the files of the folder `argv[0]`; the exit status."""
    folder = Path(argv[0])
    limit_this_process()
    template_file = folder / "tokenizer_config.json"
    with contextlib.suppress(ModelLoadError):  # the step fails, too
        template_file = chat_template_file(folder)
    return run_steps(
        (template_file, lambda: try_template(folder)),
        (tokenizer_file(folder), lambda: try_tokenizer(folder)),
    )


def try_template(folder: Path) -> None:
    """Compile the chat template, if there is one, and render sample conversations. A template may
    refuse them, but must end. Raises ModelLoadError."""
    templates = load_chat_templates(folder)
    if templates.default is not None:
        _render(templates.default, _PLAIN, None, folder)
    if templates.for_tools is not None:
        _render(templates.for_tools, _SAMPLE, [_TOOL], folder)


def _render(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    folder: Path,
) -> None:
    try:
        template.render(messages, tools=tools)
    except InvalidRequest as error:
        if isinstance(error.__cause__, BudgetExceeded | MemoryError):
            raise ModelLoadError(f"{chat_template_file(folder)}: {error.message}") from error


def try_tokenizer(folder: Path) -> None:
    """Load the tokenizer, encode and decode the samples. Raises ModelLoadError, or whatever the
    libraries raise."""
    tokenizer = Tokenizer(folder)
    load_sampling_defaults(folder, tokenizer.eos_id)
    find_markup(tokenizer)
    GrammarChecker(folder, tokenizer)
    for message in _SAMPLE:
        tokenizer.decode(tokenizer.encode(str(message["content"]), add_special_tokens=True))
    tokenizer.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
