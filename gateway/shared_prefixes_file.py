"""Reads the file in which an operator declares beginnings of prompts that all clients share.

Each line is a body of `POST /tokenize`: a text in `prompt`, or a conversation in `messages`, with
`tools` if its prompts have any. It is encoded as a request with these fields would be.
"""

from __future__ import annotations

import logging
from pathlib import Path

from gateway.admission.shared_prefixes import SharedPrefixes
from gateway.api.body_reader import fields_of
from gateway.api.chat_prompt import encode_whole
from gateway.api.tokenize import TokenizeRequest, conversation_of
from gateway.chat.markup import ChatMarkup, find_markup
from gateway.parser_names import ALLOW
from gateway.settings import GatewaySettings
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ConfigError, InvalidRequest

log = logging.getLogger(__name__)


def load_shared_prefixes(settings: GatewaySettings, tokenizer: Tokenizer) -> SharedPrefixes:
    """The prefixes that the operator declares, if any. Raises ConfigError."""
    path = settings.shared_prefixes_file
    if path is None:
        return SharedPrefixes()
    markup = find_markup(
        tokenizer,
        settings.tool_parser,
        settings.reasoning_parser,
        settings.control_tokens_in_text == ALLOW,
    )
    prefixes = read_shared_prefixes(path, tokenizer, markup)
    log.info("all clients share %d prefixes", len(prefixes))
    return prefixes


def read_shared_prefixes(path: str, tokenizer: Tokenizer, markup: ChatMarkup) -> SharedPrefixes:
    """The prefixes of a file. Raises ConfigError, which names the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"shared_prefixes_file {path} cannot be read: {error}") from error
    prefixes = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prefixes.append(_token_ids(line, tokenizer, markup))
            except InvalidRequest as error:
                raise ConfigError(
                    f"shared_prefixes_file {path}, line {number}: {error.message}"
                ) from error
    if not prefixes:
        raise ConfigError(f"shared_prefixes_file {path} declares no prefix")
    return SharedPrefixes(prefixes)


def _token_ids(line: str, tokenizer: Tokenizer, markup: ChatMarkup) -> list[int]:
    """The token ids of one line. Raises InvalidRequest."""
    fields, _ = fields_of(TokenizeRequest, line.encode(), refuse_unknown=True)
    if fields.prompt is not None:
        return tokenizer.encode(fields.prompt, fields.add_special_tokens is not False)
    with_special = fields.add_special_tokens is True
    return encode_whole(tokenizer, markup, conversation_of(fields), with_special)
