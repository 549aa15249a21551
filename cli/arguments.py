"""Separates a command's flags from the names among them, as in `baton drain d1 --cluster c`.

Knows which flags take a value. A flag's value may follow it or be joined to it by `=`. Names may
stand before, between and after flags; everything behind `--` is a name.
"""

from __future__ import annotations

from collections.abc import Sequence

from process.settings.spec import specs_of


def split_names(cls: type, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags in `argv` with their values, for `load_settings(cls, ...)`, and the names.

    A flag of a list takes one value, with commas; the next argument is a name. A switch takes its
    value by `=` only. Unknown flags are left to `load_settings`, which refuses them.
    """
    valued = [spec for spec in specs_of(cls).values() if spec.base is not bool]
    takes_value = {"--config", *(name for spec in valued for name in spec.flag_names)}
    flags: list[str] = []
    names: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return flags, names + rest
        if not argument.startswith("-") or argument == "-":
            names.append(argument)
            continue
        flags.append(argument)
        if argument in takes_value and rest:
            flags.append(rest.pop(0))
    return flags, names
