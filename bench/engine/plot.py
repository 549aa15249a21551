"""Plots of `bench.engine`'s figures: contestants side by side, or a step as its context grows.

Needs matplotlib. Knows the figures, not how they were measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.errors import BatonError

Measured = Mapping[str, Mapping[str, Sequence[float]]]
"""Tokens per second by work and contestant, one for each repeat."""


def plot_side_by_side(title: str, figures: Measured, path: Path) -> None:
    """Each work's medians relative to ours, the first contestant's (1); whiskers: least to most."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    names = list(next(iter(figures.values())))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places, heights, spreads = [], [], []
        for place, by_name in enumerate(figures.values()):
            ours, values = statistics.median(by_name[names[0]]), by_name[name]
            height = statistics.median(values) / ours
            places.append(place + (number - (len(names) - 1) / 2) * width)
            heights.append(height)
            spreads.append((height - min(values) / ours, max(values) / ours - height))
        axes.bar(places, heights, width, label=name, yerr=list(zip(*spreads, strict=True)))
    axes.set_xticks(range(len(figures)), list(figures))
    axes.set_ylabel(f"tokens per second over {names[0]}'s")
    axes.set_title(title)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(names), frameon=False)
    axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def plot_sweep(
    title: str, figures: Measured, batch: int, bytes_read: Sequence[int], limit: float, path: Path
) -> None:
    """Milliseconds of a decode step against the bytes that it reads, with the limit (bytes/s)."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    gigabytes = [size / 1e9 for size in bytes_read]
    for name in next(iter(figures.values())):
        steps = [1e3 * batch / statistics.median(by_name[name]) for by_name in figures.values()]
        axes.plot(gigabytes, steps, marker="o", label=name)
    axes.plot(gigabytes, [1e3 * size / limit for size in bytes_read], ":", label="limit of memory")
    axes.set(xlabel="GB of weights and KV that a step reads", ylabel="ms a step", title=title)
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def load_pyplot() -> Any:
    """matplotlib's pyplot, drawing into files. Raises BatonError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise BatonError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
