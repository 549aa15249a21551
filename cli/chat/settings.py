"""Settings of `baton chat`, and the question among its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cli.arguments import split_names
from cli.status import SENT_KEY_PATTERN, StatusSettings
from process.settings import setting, setting_of
from protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Settings of `baton chat`."""

    router_url: str = setting_of(StatusSettings, "router_url", also="--url")
    model: str | None = setting(
        None, help="name of the model; none: the one that is served", env="BATON_CHAT_MODEL"
    )
    system: str | None = setting(
        None, help="system prompt of the conversation", env="BATON_CHAT_SYSTEM", free_text=True
    )
    api_key: str | None = setting(
        None,
        help="key of the HTTP API, if the router asks for one",
        pattern=SENT_KEY_PATTERN,
        secret=True,
    )
    cert_file: str | None = setting_of(StatusSettings, "cert_file")
    temperature: float | None = setting(
        None, help="randomness; none: as the model recommends", minimum=0, maximum=2
    )
    max_tokens: int | None = setting(
        None, help="longest answer; none: what the context leaves", unit="tokens", minimum=1
    )
    timeout_s: float = setting(
        600.0, help="longest silence of the router in an answer", unit="s", minimum=0.1
    )


def split_question(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """The flags in `argv`, and the question among them. Raises ConfigError for more than one
    question."""
    flags, questions = split_names(ChatSettings, argv)
    if len(questions) > 1:
        raise ConfigError(f"ask one question, in quotes, not {len(questions)}: {questions}")
    return flags, questions[0] if questions else None
