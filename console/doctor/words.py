"""Numbers in words, as the dashboard writes them."""

from process.figures import count, integer, ms, percent, rate, significant, times

__all__ = ["count", "integer", "ms", "percent", "rate", "significant", "times"]
