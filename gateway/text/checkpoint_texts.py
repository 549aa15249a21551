"""Reads the small files of a checkpoint that define how text becomes a prompt.

`tokenizer_config.json`, `chat_template.jinja` and the size of the vocabulary in `config.json`;
`gateway.text.tokenizer` reads `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.json_keys import JsonKeys, read_json_object
from checkpoint.regular_file import is_there, read_text
from checkpoint.vocabularies.tokenizer_json import special_tokens_of, tokenizer_file
from gateway.text.chat_template import ChatTemplate
from protocol.errors import ModelLoadError

MAX_TEMPLATE_BYTES = 1024 * 1024
ADDITIONAL_TEMPLATES = "additional_chat_templates"
_TEMPLATE_FILE, _CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
_PROCESSOR_FILE = "chat_template.json"  # of checkpoints for images and text
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerConfig:
    """The parts of tokenizer_config.json that Baton uses.

    `added_tokens` are the options of tokens by id, `special_tokens` texts by name (`bos_token`),
    `chat_templates` sources by name (`default`, `tool_use`).
    """

    added_tokens: Mapping[int, dict[str, Any]]
    special_tokens: dict[str, str]
    add_bos_token: bool | None
    chat_templates: dict[str, str]


@dataclass(frozen=True)
class ChatTemplates:
    """The checkpoint's chat templates: the default one, and the one for conversations with tools,
    which may be the same."""

    default: ChatTemplate | None
    for_tools: ChatTemplate | None


def load_tokenizer_config(folder: Path) -> TokenizerConfig:
    """The file's settings; empty without a file. Raises ModelLoadError.

    As in transformers, `special_tokens_map.json` counts for older checkpoints, whose settings list
    no added tokens.
    """
    keys = optional_keys(folder / _CONFIG_FILE)
    add_bos = keys.flag("add_bos_token", False) if "add_bos_token" in keys else None
    special = special_tokens_of(tokenizer_file(folder)) | _special_tokens(keys)
    if "added_tokens_decoder" not in keys:
        special |= _special_tokens(optional_keys(folder / "special_tokens_map.json"))
    return TokenizerConfig(_added_tokens(keys), special, add_bos, _templates(keys))


def load_chat_templates(folder: Path) -> ChatTemplates:
    """The checkpoint's chat templates, compiled. Raises ModelLoadError.

    As in transformers, `chat_template.jinja` overrides all templates in `tokenizer_config.json`,
    files in `additional_chat_templates` override others of their names, and the template `tool_use`
    serves conversations with tools. Without any of these, `chat_template.json` counts.
    """
    config, file = load_tokenizer_config(folder), chat_template_file(folder)
    sources = {} if file.name == _TEMPLATE_FILE else config.chat_templates
    if file.name == _PROCESSOR_FILE:
        sources = _templates(optional_keys(file))
    found = {}
    for name, own_file in (
        ("default", folder / _TEMPLATE_FILE),
        ("tool_use", folder / ADDITIONAL_TEMPLATES / "tool_use.jinja"),
    ):
        source, place = sources.get(name), file
        if is_there(own_file):
            source, place = read_text(own_file, MAX_TEMPLATE_BYTES), own_file
        found[name] = None if source is None else _compiled(place, source, config)
    default, for_tools = found["default"], found["tool_use"]
    return ChatTemplates(default or for_tools, for_tools or default)


def chat_template_file(folder: Path) -> Path:
    """The file that has the default chat template, whether it is there or not. Raises
    ModelLoadError."""
    own, processor = folder / _TEMPLATE_FILE, folder / _PROCESSOR_FILE
    if is_there(own):
        return own
    has_none = "chat_template" not in optional_keys(folder / _CONFIG_FILE)
    return processor if has_none and is_there(processor) else folder / _CONFIG_FILE


def _compiled(file: Path, source: str, config: TokenizerConfig) -> ChatTemplate:
    if len(source) > MAX_TEMPLATE_BYTES:
        raise ModelLoadError(f"{file}: the chat template has more than {MAX_TEMPLATE_BYTES} bytes")
    try:
        return ChatTemplate(source, config.special_tokens)
    except ModelLoadError as error:
        raise ModelLoadError(f"{file}: {error}") from error


def load_vocab_size(folder: Path) -> int | None:
    """The model's vocabulary size, if config.json has one. Raises ModelLoadError."""
    size: int | None = model_keys(folder).integer("vocab_size", None)
    return size


def model_keys(folder: Path) -> JsonKeys:
    """The keys of config.json, completed by those of its language model if that is one part of
    several. Raises ModelLoadError."""
    keys = optional_keys(folder / "config.json")
    text = keys.table("text_config")
    if text is None:
        return keys
    whole = {key: value for key, value in keys.values.items() if value is not None}
    return JsonKeys({**text.values, **whole}, keys.where)


def optional_keys(path: Path) -> JsonKeys:
    """The keys of a JSON file that need not exist. Raises ModelLoadError."""
    return JsonKeys(read_json_object(path) if is_there(path) else {}, str(path))


def _added_tokens(keys: JsonKeys) -> dict[int, dict[str, Any]]:
    table = keys.table("added_tokens_decoder")
    if table is None:
        return {}
    found: dict[int, dict[str, Any]] = {}
    for id_ in table.values:
        if not (id_.isascii() and id_.isdigit() and len(id_) < 10):
            raise table.wrong(id_, "a token under its id")
        token = table.table(id_)
        if token is None:
            raise table.wrong(id_, "a token")
        options: dict[str, Any] = {"content": token.text("content")}
        found[int(id_)] = options | {
            name: token.flag(name, False) for name in _FLAGS if name in token
        }
    return found


def _special_tokens(keys: JsonKeys) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, as text, including those with the model's own
    names."""
    extra = keys.raw("extra_special_tokens", None)
    named: dict[str, Any] = {
        name: value for name, value in keys.values.items() if name.endswith("_token")
    }
    if isinstance(extra, dict):
        named |= extra
    found: dict[str, str] = {}
    for name, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _templates(keys: JsonKeys) -> dict[str, str]:
    """The templates by name, in an object or a list; a single one is the default."""
    value = keys.raw("chat_template", None)
    named: dict[str, Any] = {} if value is None else {"default": value}
    if isinstance(value, dict):
        named = value
    elif isinstance(value, list):
        named = {
            each["name"]: each["template"]
            for each in value
            if isinstance(each, dict) and isinstance(each.get("name"), str) and "template" in each
        }
    if not all(isinstance(each, str) for each in named.values()):
        raise keys.wrong("chat_template", "a template, or a list of named ones")
    return named
