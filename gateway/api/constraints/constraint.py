"""One constraint on an answer's text, from any field or API."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class ConstraintKind(enum.Enum):
    """The kind of a constraint's value."""

    OBJECT = "any JSON object; there is no value"
    SCHEMA = "a JSON schema, as a value or as JSON text"
    REGEX = "a regular expression that matches the whole text"
    CHOICE = "a list of texts"
    GRAMMAR = "a grammar in Lark or GBNF"
    STRUCTURAL_TAG = "a structural tag, as a value or as JSON text"


@dataclass(frozen=True, slots=True)
class Constraint:
    """`param` is the client's name of the field, for errors. If the schema is `strict`, parts that
    cannot be enforced are an error."""

    param: str
    kind: ConstraintKind
    value: Any = None
    strict: bool = False
