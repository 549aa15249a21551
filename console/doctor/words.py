"""Numbers in words, as the dashboard writes them."""

from __future__ import annotations

_NBSP = "\u00a0"


def ms(value: float | None) -> str:
    """Three significant digits; from 1,000 ms in seconds; a dash for unknown values."""
    if value is None:
        return "–"
    if value >= 1000:
        return significant(value / 1000) + _NBSP + "s"
    return significant(value) + _NBSP + "ms"


def significant(value: float) -> str:
    """Three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """Whole percent, one decimal under 10 %."""
    if share is None:
        return "–"
    return f"{share * 100:.{1 if share < 0.0995 else 0}f}{_NBSP}%"


def times(value: float | None) -> str:
    """A pressure or a ratio: `1.42×`."""
    return "–" if value is None else f"{value:.2f}×"


def rate(bytes_per_s: float | None) -> str:
    """A link's rate in decimal units, as links are sold."""
    if bytes_per_s is None:
        return "–"
    return significant(bytes_per_s / 1e9) + _NBSP + "GB/s"


def count(number: float, noun: str) -> str:
    """`1 worker`, `3 workers`, `1,204 requests`."""
    return f"{number:,.0f} {noun}{'' if round(number) == 1 else 's'}"
