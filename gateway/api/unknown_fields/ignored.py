"""Which fields of a validated body are ignored, by name.

Walks only bodies that are known to have ignored fields. Names go into the header `x-baton-ignored`,
so they leave out places in lists: `messages[].id` is one name, however many messages have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from gateway.api.strict_model import StrictModel
from gateway.api.union_branches import LeftOut
from gateway.api.unknown_fields.ignorable_fields import Ignorable
from gateway.api.unknown_fields.lost_constraints import lost_constraint
from gateway.api.unknown_fields.misspellings import meant_field
from protocol.errors import InvalidRequest

MAX_CHECKED = 64
"""The most unknown names that are compared with the known ones."""
MAX_NAME_CHARS = 100
MAX_NAMES = 1000


@dataclass(frozen=True, slots=True)
class _Found:
    """An ignored field: its full path, its path without places, and its own name, value and model
    if it is unknown. For an entry of a list that is left out, its kind and its model."""

    path: str
    generic: str
    unknown: str = ""
    value: Any = None
    model: type[StrictModel] | None = None
    kind: str = ""


def take_ignored(body: StrictModel, refuse: bool) -> list[str]:
    """The names of a body's ignored fields; unknown fields are removed from the body. Raises
    InvalidRequest for a slip or, with `refuse`, for any ignored field.
    """
    names: dict[str, None] = {}
    checked: set[tuple[str, type[StrictModel]]] = set()
    for found in _walk(body, "", ""):
        if refuse:
            what = "is not a known field" if found.unknown else "is not supported"
            raise InvalidRequest(f"'{found.path}' {what}", found.path)
        if found.model is not None and len(checked) < MAX_CHECKED:
            question = (found.unknown or found.kind, found.model)
            if question not in checked:
                checked.add(question)
                _check_found(found, found.model)
        if len(names) < MAX_NAMES:
            names[found.generic[:MAX_NAME_CHARS]] = None
    return list(names)


def _check_found(found: _Found, model: type[StrictModel]) -> None:
    """Raises InvalidRequest for a field that must not be ignored."""
    if issubclass(model, LeftOut):
        _check_kind(found, model.usual)
        return
    _check_slip(found, model)
    _check_constraint(found, model)


def _check_slip(found: _Found, model: type[StrictModel]) -> None:
    if found.unknown in _all_names():
        return  # of another endpoint
    meant = meant_field(found.unknown, _names_of(model))
    if meant is not None:
        raise InvalidRequest(
            f"'{found.path}' is not a known field; did you mean '{meant}'?", found.path
        )


def _check_kind(found: _Found, usual: tuple[str, ...]) -> None:
    meant = meant_field(found.kind, usual)
    if meant is not None:
        raise InvalidRequest(
            f"'{found.path}': '{found.kind}' is not a known type; did you mean '{meant}'?",
            found.path,
        )


def _check_constraint(found: _Found, model: type[StrictModel]) -> None:
    """Raises InvalidRequest if ignoring this field would change the answer."""
    if model.refuses_unknown:
        raise InvalidRequest(f"'{found.path}' is not a known field", found.path)
    lost = lost_constraint(found.unknown, found.value) if model.constrains else None
    if lost is None:
        return
    path, fields = lost
    outer, _, name = path.rpartition(".")
    reason = f"and this API has no such field: use {fields}"
    if outer and name in _names_of(model):
        reason = f"and '{outer}' is not read: give '{name}' outside of it"
    raise InvalidRequest(f"'{path}' would constrain the answer, {reason}", path)


def _walk(model: StrictModel, path: str, generic: str) -> Iterator[_Found]:
    """All ignored fields of a model and of the models in it."""
    extras = model.__pydantic_extra__
    if isinstance(model, LeftOut):
        name = f"{generic.removesuffix('[]')}[{model.type}]"
        yield _Found(f"{path}.type", name, model=type(model), kind=model.type)
    elif extras:
        for name, value in extras.items():
            if value is not None:
                yield _Found(_joined(path, name), _joined(generic, name), name, value, type(model))
    if extras:
        extras.clear()
    for field, name, ignorable in _ignorables(type(model)):
        for part in ignorable.names(getattr(model, field)):
            yield _Found(_joined(path, name), _joined(generic, name) + part)
    for field, value in model.__dict__.items():
        if isinstance(value, StrictModel):
            yield from _walk(value, _joined(path, field), _joined(generic, field))
        elif isinstance(value, list) and value and isinstance(value[0], StrictModel):
            for place, each in enumerate(value):
                yield from _walk(
                    each, f"{_joined(path, field)}[{place}]", f"{_joined(generic, field)}[]"
                )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@cache
def _all_names() -> frozenset[str]:
    """The names that clients use for the fields of all models."""
    waiting, names = [StrictModel], set[str]()
    while waiting:
        model = waiting.pop()
        names.update(_names_of(model))
        waiting += model.__subclasses__()
    return frozenset(names)


@cache
def _names_of(model: type[StrictModel]) -> tuple[str, ...]:
    """The names that clients use for the fields of a model."""
    return tuple(field.alias or name for name, field in model.model_fields.items())


@cache
def _ignorables(model: type[StrictModel]) -> tuple[tuple[str, str, Ignorable], ...]:
    """The fields that a model knows and does not honour, with the names that clients use."""
    return tuple(
        (name, field.alias or name, each)
        for name, field in model.model_fields.items()
        for each in field.metadata
        if isinstance(each, Ignorable)
    )
