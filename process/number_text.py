"""Numbers for people: one way to write each kind, on the page, in findings, tables and logs; pure.

`console/dashboard/page/numbers.js` has the same rules for the page's own numbers, and a test
compares the two. None means "not known" and becomes a dash.
"""

from __future__ import annotations

from collections.abc import Callable

_NBSP = "\u00a0"
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def _or_dash(write: Callable[[float], str]) -> Callable[[float | None], str]:
    def written(value: float | None) -> str:
        return "–" if value is None else write(value)

    written.__doc__ = write.__doc__
    return written


@_or_dash
def integer(value: float) -> str:
    """`15,234`."""
    return f"{value:,.0f}"


@_or_dash
def exact(value: float) -> str:
    """All digits, for settings: `1,000`, `0.95`."""
    return f"{value:,}".removesuffix(".0")


@_or_dash
def significant(value: float) -> str:
    """Three significant digits: `0.42`, `4.21`, `22.4`, `418`."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


@_or_dash
def ms(value: float) -> str:
    """A duration in milliseconds: `22.4 ms`, from one second on `1.48 s`."""
    if value >= 999.5:
        return f"{significant(value / 1000)}{_NBSP}s"
    return f"{significant(value)}{_NBSP}ms"


@_or_dash
def age(milliseconds: float) -> str:
    """How long ago, or how long it took: `7.4 s`, `51 s`, `19 min`, `6 h`."""
    seconds = max(0.0, milliseconds / 1000)
    if seconds < 10:
        return f"{seconds:.1f}{_NBSP}s"
    if seconds < 120:
        return f"{int(seconds)}{_NBSP}s"
    minutes = int(seconds / 60)
    return f"{minutes}{_NBSP}min" if seconds < 7200 else f"{minutes // 60}{_NBSP}h"


@_or_dash
def tenths(value: float) -> str:
    """One decimal, for rows of a table that should add up: `1,204.3`."""
    return f"{value:,.1f}"


@_or_dash
def percent(share: float) -> str:
    """A share, from 0 to 1: `71 %`, below a tenth `9.5 %`."""
    return f"{share * 100:.{1 if 0 < share < 0.0995 else 0}f}{_NBSP}%"


@_or_dash
def times(value: float) -> str:
    """A pressure or a ratio: `1.42×`."""
    return f"{value:.2f}×"


@_or_dash
def size(value: float) -> str:
    """A size in memory: `4.00 MiB`."""
    power = 0
    while power + 1 < len(_SIZES) and value >= 1024 ** (power + 1):
        power += 1
    write = significant if power else integer
    return f"{write(value / 1024**power)}{_NBSP}{_SIZES[power]}"


@_or_dash
def rate(bytes_per_s: float) -> str:
    """A link's rate in decimal units, as links are sold: `1.24 GB/s`."""
    unit, name = (1e3, "kB")
    if bytes_per_s == 0 or bytes_per_s >= 1e7:
        unit, name = (1e9, "GB")
    elif bytes_per_s >= 1e6:
        unit, name = (1e6, "MB")
    return f"{significant(bytes_per_s / unit)}{_NBSP}{name}/s"


def count(number: float, noun: str) -> str:
    """`1 worker`, `3 workers`, `1,204 requests`; the noun may have an adjective."""
    return f"{integer(number)} {noun}{'' if round(number) == 1 else 's'}"
