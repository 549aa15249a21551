"""The messages of a conversation, and the commands that change them; no terminal, no HTTP."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from cli.chat.answer_stream import Message
from process.settings.home_paths import home_path
from protocol.errors import ConfigError

COMMANDS = {
    "/reset": "forget all messages but the system prompt",
    "/system TEXT": "replace the system prompt; without TEXT, remove it",
    "/regenerate": "answer the last question again",
    "/save FILE": "write the messages as JSON",
    "/help": "list these commands; Ctrl-C stops an answer, Ctrl-D ends",
}


@dataclass
class Conversation:
    """A system prompt, and turns of user and assistant."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    _replaced: Message | None = field(default=None, init=False)
    """The answer that is being made again."""

    def messages(self) -> list[Message]:
        """All messages, as the API takes them."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns]

    def ask(self, text: str) -> None:
        """Add a question."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the answer to the last question. Without text, the conversation becomes as before the
        question; a question that was asked again keeps its former answer."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        elif self._replaced is not None:
            self.turns.append(self._replaced)
        else:
            self.turns.pop()
        self._replaced = None

    def reset(self) -> None:
        """Forget all turns."""
        self.turns.clear()

    def reopen(self) -> None:
        """Set the last answer aside, so that its question can be answered again. Raises ConfigError
        if there is none."""
        if not self.turns:
            raise ConfigError("there is no answer to generate again")
        self._replaced = self.turns.pop()

    def save(self, name: str) -> Path:
        """Write the messages to a file, and return its path. Raises ConfigError."""
        if not name:
            raise ConfigError("name a file: /save FILE")
        path = home_path(name)
        text = json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=2)
        try:
            path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        return path


def parse_command(line: str) -> tuple[str, str] | None:
    """A command and its argument; None for a message. Raises ConfigError for an unknown one."""
    if not line.startswith("/"):
        return None
    name, _, argument = line.partition(" ")
    known = [each.split()[0] for each in COMMANDS]
    if name not in known:
        raise ConfigError(f"{name} is not a command; use one of {', '.join(known)}")
    return name, argument.strip()
