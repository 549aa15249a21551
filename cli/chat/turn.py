"""One turn of a conversation on a console: the answer as it streams, and a line about it."""

from __future__ import annotations

import contextlib

from rich.console import Console

from cli.chat.answer_stream import AnswerStream, Endpoint
from cli.chat.conversation import Conversation
from cli.output.terminal_text import shown


def show_answer(endpoint: Endpoint, conversation: Conversation, console: Console) -> AnswerStream:
    """Stream the answer to the last question to the console, then print a line about it. Ctrl-C
    stops the answer; the text so far then counts as the answer. Raises ServiceError."""
    stream = AnswerStream(endpoint, conversation.messages())
    was_stopped = False
    try:
        with contextlib.closing(stream.texts()) as texts:
            for text in texts:
                console.print(shown(text), end="")
                console.file.flush()
    except KeyboardInterrupt:
        was_stopped = True
    finally:
        conversation.answer(stream.text)
        if stream.text:
            console.print()
    console.print("stopped" if was_stopped else summary(stream), style="dim")
    return stream


def summary(stream: AnswerStream) -> str:
    """What an answer cost and where it ran, in one line."""
    parts = []
    if stream.ttft_s is not None:
        parts.append(f"first token {1000 * stream.ttft_s:.0f} ms")
    if stream.tokens_per_s is not None:
        parts.append(f"{stream.tokens_per_s:.0f} tokens/s")
    if stream.num_prompt_tokens is not None:
        parts.append(f"{stream.num_cached} of {stream.num_prompt_tokens} tokens cached")
    if stream.place is not None:
        parts.append(stream.place)
    return " | ".join(parts)
