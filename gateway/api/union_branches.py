"""The branch of a union that a value of a body belongs to: by its JSON type, or by its own `type`.

pydantic puts the names of branches into the places of errors. These names are in angle brackets, so
that `http_kit.errors` can leave them out: the rest is the path in the client's own body. Every
union of a request model has a discriminator from here, and tags in angle brackets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NoReturn

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, ValidationInfo
from pydantic_core import PydanticCustomError

from gateway.api.strict_model import StrictModel
from gateway.api.unknown_fields.ignorable_fields import note

TEXT, LIST, OBJECT, BOOLEAN = (Tag(f"<{each}>") for each in ("text", "list", "object", "boolean"))
LEFT_OUT, REFUSED = Tag("<left out>"), Tag("<refused>")
NO_GROUPS: Mapping[str, Iterable[str]] = MappingProxyType({})
_SHAPES: dict[type, tuple[str, str]] = {
    str: (TEXT.tag, "a string"),
    list: (LIST.tag, "a list"),
    dict: (OBJECT.tag, "an object"),
    bool: (BOOLEAN.tag, "a boolean"),
}


def by_shape(*types: type) -> Discriminator:
    """Tells texts, lists, objects and booleans apart; the branches have the tags above."""
    tags = {each: _SHAPES[each][0] for each in types}
    names = " or ".join(_SHAPES[each][1] for each in types)
    return Discriminator(
        lambda value: tags.get(type(value)),
        custom_error_type="wrong_shape",
        custom_error_message=f"input should be {names}",
    )


TEXT_OR_LIST = by_shape(str, list)


def by_type(
    *known: str,
    usual: str,
    others: Tag | None = None,
    refused: Iterable[str] = (),
    same: Mapping[str, Iterable[str]] = NO_GROUPS,
) -> Discriminator:
    """Tells objects apart by their `type`, see `type_branches`."""
    return Discriminator(
        type_branches(*known, usual=usual, others=others, refused=refused, same=same),
        custom_error_type="unsupported",
        custom_error_message=f"its type must be {' or '.join(map(repr, known))}",
    )


def null_as(usual: str) -> BeforeValidator:
    """Makes null the `usual` value, which a field that is absent has, too."""
    return BeforeValidator(lambda value: usual if value is None else value)


def type_branches(
    *known: str,
    usual: str,
    others: Tag | None = None,
    refused: Iterable[str] = (),
    same: Mapping[str, Iterable[str]] = NO_GROUPS,
) -> Callable[[Any], str | None]:
    """Tells objects apart by their `type`: the branch of "text" has the tag "<text>". Without a
    type an object is of the `usual` one. `same` has the names of branches for several types. Any
    type that is not known belongs to the branch of `others`; without such a branch it is an error.
    """
    tags = {each: f"<{each}>" for each in known} | dict.fromkeys(refused, REFUSED.tag)
    for name, kinds in same.items():
        tags |= dict.fromkeys(kinds, f"<{name}>")
    rest = None if others is None else others.tag

    def branch(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return tags.get(kind, rest) if isinstance(kind, str) else f"<{usual}>"

    return branch


def _note_kind(kind: str, info: ValidationInfo) -> str:
    note(info)
    return kind


class LeftOut(StrictModel):
    """A list entry of a kind that Baton does not have. It is left out and named, or refused if its
    kind looks like a slip of a `usual` one."""

    usual: ClassVar[tuple[str, ...]] = ()

    type: Annotated[str, Field(max_length=256), AfterValidator(_note_kind)]


def _refuse_kind(kind: str) -> NoReturn:
    raise PydanticCustomError(
        "unsupported", "'{kind}' is not supported: the model reads text alone", {"kind": kind}
    )


class Refused(StrictModel):
    """A part of a content that the model cannot read, such as an image. It is an error: the model
    would answer something else than was asked."""

    text: ClassVar[str] = ""
    """Never read, because no object of this class is made; the type checker wants it."""

    type: Annotated[str, Field(max_length=256), AfterValidator(_refuse_kind)]
