"""The grammar of structural tags: text in which certain openings are followed by JSON of a schema.

Reads the two shapes that vLLM and SGLang take: `structures` with `triggers`, and a `format` of
`triggered_tags`. Knows no request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.grammars.grammar import check_schema_length, json_schema_part, text_part, with_integers
from protocol.errors import InvalidRequest

MAX_TAGS = 128
_TEXT = "TAG_TEXT: /(.|\\n)*/"


def structural_tag_grammar(
    wanted: dict[str, Any], param: str, special_id: Callable[[str], int | None]
) -> str:
    """The grammar in llguidance's Lark. `special_id` gives the id of a special token by
    its text, and None for other texts.

    Raises InvalidRequest for what is not one of the two shapes.
    """
    tags, triggers = _tags_of(wanted, param)
    if not 0 < len(tags) <= MAX_TAGS or not triggers:
        raise InvalidRequest(f"'{param}' needs triggers, and 1 to {MAX_TAGS} tags", param)
    lines = []
    for number, (begin, schema, end) in enumerate(tags):
        trigger = next((each for each in triggers if each and begin.startswith(each)), None)
        if trigger is None:
            raise InvalidRequest(f"'{param}': no trigger begins {begin!r}", param)
        check_schema_length(schema, param)
        rest = begin[len(trigger) :]
        parts = [text_part(rest)] if rest else []
        parts += [json_schema_part(with_integers(schema)), *([text_part(end)] if end else [])]
        body = " ".join(parts)
        token_id = special_id(trigger)
        if token_id is not None:
            lines.append(f"tag_{number}: TAG_TEXT <[{token_id}]> {body}")
        else:
            lines.append(f"tag_{number}_begin[lazy]: TAG_TEXT {text_part(trigger)}")
            lines.append(f"tag_{number}: tag_{number}_begin {body}")
    choices = " | ".join(f"tag_{number}" for number in range(len(tags)))
    return "\n".join([f"start: ({choices})* tag_end", "tag_end: TAG_TEXT", _TEXT, *lines])


_Tag = tuple[str, dict[str, Any] | bool, str]


def _tags_of(wanted: dict[str, Any], param: str) -> tuple[list[_Tag], list[str]]:
    """Each tag as its beginning, its schema and its end; and the triggers."""
    shape = wanted.get("format", wanted)
    is_new = "format" in wanted
    if not isinstance(shape, dict) or (is_new and shape.get("type") != "triggered_tags"):
        raise InvalidRequest(f"'{param}.format' is supported for the type 'triggered_tags'", param)
    named = shape.get("tags" if is_new else "structures")
    triggers = shape.get("triggers")
    if not isinstance(named, list) or not isinstance(triggers, list):
        raise InvalidRequest(f"'{param}' needs a list of tags and one of triggers", param)
    if not all(isinstance(each, str) for each in triggers):
        raise InvalidRequest(f"'{param}.triggers' must be strings", param)
    return [_tag_of(each, param, is_new) for each in named], triggers


def _tag_of(tag: Any, param: str, is_new: bool) -> _Tag:
    if not isinstance(tag, dict):
        raise InvalidRequest(f"'{param}': a tag must be an object", param)
    begin, end, schema = tag.get("begin"), tag.get("end"), tag.get("schema")
    content = tag.get("content")
    if is_new and isinstance(content, dict) and content.get("type") == "json_schema":
        schema = content.get("json_schema")
    if (
        not isinstance(begin, str)
        or not isinstance(end, str)
        or not isinstance(schema, dict | bool)
    ):
        raise InvalidRequest(f"'{param}': a tag must have 'begin', 'end' and a JSON schema", param)
    return begin, schema, end
