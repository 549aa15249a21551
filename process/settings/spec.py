"""One setting: its type, bounds and names, and its conversion from text or TOML.

A spec is derived from a dataclass field that was declared with `setting(...)`. It does not know
where a value comes from: it raises ValueError with the accepted values, and the loader in
`process.settings.loader` adds the flag, variable or key at fault.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
import types
import typing
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ENV_PREFIX = "BATON_"
NONE_TEXT = "none"
_METADATA_KEY = "baton.setting"
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


@dataclass(frozen=True)
class SettingDetails:
    """The properties of a `setting(...)` besides its type and default."""

    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    pattern: str = ""
    env: str = ""
    flag: bool = True
    secret: bool = False
    free_text: bool = False
    also: str = ""


def setting(default: Any = dataclasses.MISSING, *, help: str, **details: Any) -> Any:
    """A dataclass field that is a setting; without `default` it is required.

    `details`: `unit` ("ms"), `choices`, `minimum`, `maximum` (both inclusive), `pattern` (a
    regular expression for the whole text), `env` (a name other than BATON_<FIELD>), `flag=False`
    (no flag: only environment and file), `secret=True` (kept out of argument lists and repr),
    `free_text=True` (may hold line breaks and begin or end with a space), `also` (another flag with
    this meaning, `--url`, which help leaves out).
    """
    return _field(default, SettingDetails(help=help, **details))


def setting_of(owner: type, name: str, **changes: Any) -> Any:
    """A copy of the setting that another class declares under this name.

    `changes` (`default`, `help` or any of the other details) replace those of the original.
    """
    field = next(each for each in dataclasses.fields(owner) if each.name == name)
    default = changes.pop("default", field.default)
    return _field(default, dataclasses.replace(field.metadata[_METADATA_KEY], **changes))


def _field(default: Any, details: SettingDetails) -> Any:
    return dataclasses.field(
        default=default, repr=not details.secret, metadata={_METADATA_KEY: details}
    )


@dataclass(frozen=True)
class SettingSpec:
    """A setting of one process, with its parsing and help text."""

    name: str
    base: type
    optional: bool
    default: Any
    details: SettingDetails

    @property
    def required(self) -> bool:
        """Whether the process cannot start without a value."""
        return self.default is dataclasses.MISSING

    @property
    def env_name(self) -> str:
        """The environment variable, `BATON_<FIELD>` unless the field names another."""
        return self.details.env or ENV_PREFIX + self.name.upper()

    @property
    def file_env_name(self) -> str | None:
        """The variable that names a file with the value; None unless the setting is a secret
        text."""
        return f"{self.env_name}_FILE" if self.details.secret and self.base is str else None

    @property
    def flag_name(self) -> str:
        """The long flag, as `--block-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def flag_names(self) -> tuple[str, ...]:
        """`flag_name`, and the other flag if there is one."""
        return (self.flag_name, self.details.also) if self.details.also else (self.flag_name,)

    @property
    def choices(self) -> tuple[str, ...]:
        """The accepted texts; empty if any text is accepted."""
        members = _members(self.base)
        return tuple(str(member.value) for member in members) or self.details.choices

    def accepted(self) -> str:
        """The accepted values, for errors and help: `an integer of at least 1, or none`."""
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        else:
            text = _TYPE_WORDS[self.base] + self._bounds()
        return f"{text}, or {NONE_TEXT}" if self.optional else text

    def _bounds(self) -> str:
        low, high = self.details.minimum, self.details.maximum
        parts = [f"at least {low:g}"] if low is not None else []
        parts += [f"at most {high:g}"] if high is not None else []
        bounds = " of " + " and ".join(parts) if parts else ""
        return bounds + (f" matching {self.details.pattern}" if self.details.pattern else "")

    def explain(self) -> str:
        """One line of `--help`: meaning, unit, accepted choices, default, environment variable."""
        facts = [self.details.unit] if self.details.unit else []
        if self.choices:
            facts.append(self.accepted())
        facts.append("required" if self.required else f"default: {self.to_text(self.default)}")
        in_file = f", or a file's name in {self.file_env_name}" if self.file_env_name else ""
        facts.append(f"env: {self.env_name}{in_file}")
        return f"{self.details.help} [{'; '.join(facts)}]"

    def parse_text(self, text: str) -> Any:
        """The value of a flag's or variable's text. Raises ValueError naming accepted values."""
        if self.optional and text.lower() == NONE_TEXT:
            return None
        if self.base is tuple:
            return self.check(tuple(part.strip() for part in text.split(",") if part.strip()))
        if self.base is bool:
            lowered = text.lower()
            if lowered not in _TRUE + _FALSE:
                raise self._wrong(text)
            return lowered in _TRUE
        if self.base in (int, float):
            try:
                return self.check(self.base(text))
            except ValueError:
                raise self._wrong(text) from None
        return self.check(text)

    def check(self, value: Any) -> Any:
        """A value of TOML's own types, checked. Raises ValueError naming accepted values."""
        if self.optional and value == NONE_TEXT:
            return None
        members = _members(self.base)
        if members:
            if value not in [member.value for member in members]:
                raise self._wrong(value)
            return next(member for member in members if member.value == value)
        if self.base is float and type(value) is int:
            value = float(value)
        if self.base is tuple and isinstance(value, str):
            return self.parse_text(value)
        if self.base is tuple and isinstance(value, list):
            value = tuple(value)
        if self.details.secret and isinstance(value, str):
            value = value.rstrip(
                "\r\n"
            )  # line breaks that `echo` and editors put at the end of a file
        if type(value) is not self.base:
            raise self._wrong(value)
        if (value == "" and self.default != "") or (value == () and self.details.secret):
            unset = "" if self.required else "leave it unset, or "
            raise ValueError(f"is empty; {unset}give {self.accepted()}")
        parts: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
        if not self.details.free_text:
            self._check_spaces(parts)
        part_type = str if self.base is tuple else self.base
        if not all(type(part) is part_type and self._allows(part) for part in parts):
            raise self._wrong(value)
        return value

    def _check_spaces(self, parts: tuple[Any, ...]) -> None:
        """Raise ValueError for characters that a shell, an editor or a template left in a text: in
        a header or an address they would cause an error far from here."""
        for text in parts:
            if isinstance(text, str) and (flaw := _stray_character(text)):
                shown = self._shown(text)
                raise ValueError(f"{shown} {flaw}; give {self.accepted()}")

    def _allows(self, value: Any) -> bool:
        details = self.details
        if isinstance(value, (int, float)):
            low = -math.inf if details.minimum is None else details.minimum
            high = math.inf if details.maximum is None else details.maximum
            return math.isfinite(value) and low <= value <= high
        if not isinstance(value, str):
            return False
        if self.choices and value not in self.choices:
            return False
        return not details.pattern or re.fullmatch(details.pattern, value) is not None

    def _wrong(self, value: Any) -> ValueError:
        return ValueError(f"{self._shown(value)} is not accepted; give {self.accepted()}")

    def _shown(self, value: Any) -> str:
        """A wrong value for an error message. Secrets and addresses, which may contain one, are
        hidden."""
        return "the value" if self.details.secret or "://" in str(value) else repr(value)

    def to_text(self, value: Any) -> str:
        """The text that `parse_text` turns back into `value`."""
        if value is None:
            return NONE_TEXT
        if isinstance(value, tuple):
            return ",".join(value)
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value.value if isinstance(value, enum.Enum) else value)


def _stray_character(text: str) -> str | None:
    """The fault in a text's white space and control characters, in words."""
    if "\n" in text or "\r" in text:
        return "has a line break"
    if any(unicodedata.category(each) == "Cc" for each in text):
        return "has a control character"
    if text != text.strip():
        return "begins with a space" if text[0].isspace() else "ends with a space"
    return None


_TYPE_WORDS: dict[type, str] = {
    str: "a text",
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    tuple: "a list of texts, separated by commas",
}


def specs_of(cls: type) -> Mapping[str, SettingSpec]:
    """The settings of a dataclass by field name, in order of declaration."""
    return _specs_of(cls)  # mypy does not take a generic `type[S]` for hashable


@functools.cache
def _specs_of(cls: type) -> Mapping[str, SettingSpec]:
    hints = typing.get_type_hints(cls)
    specs: dict[str, SettingSpec] = {}
    for field in dataclasses.fields(cls):
        details = field.metadata.get(_METADATA_KEY)
        assert details is not None, f"{cls.__name__}.{field.name} is not declared by setting()"
        base, optional, choices = _resolve(hints[field.name])
        assert base in _TYPE_WORDS or issubclass(base, enum.Enum), f"{field.name}: {base}"
        if choices:
            details = dataclasses.replace(details, choices=choices)
        specs[field.name] = SettingSpec(field.name, base, optional, field.default, details)
    return types.MappingProxyType(specs)


def _members(base: type) -> list[enum.Enum]:
    """The members of an enum, none for any other type."""
    return list(base) if issubclass(base, enum.Enum) else []


def _resolve(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    """The base type of an annotation, whether None is allowed, and a Literal's choices."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        rest = [part for part in typing.get_args(hint) if part is not type(None)]
        assert len(rest) == 1, f"a setting has one type, or one type and None: {hint}"
        base, _, choices = _resolve(rest[0])
        return base, True, choices
    if origin is Literal:
        return str, False, typing.get_args(hint)
    if origin is tuple:
        assert typing.get_args(hint) == (str, ...), f"tuples hold texts: {hint}"
        return tuple, False, ()
    return hint, False, ()
