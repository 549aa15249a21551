"""A published result and ours, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One figure. `theirs` is None where the paper gives none."""

    name: str
    theirs: float | None
    ours: float
    note: str = ""


@dataclass(frozen=True)
class Result:
    """A table of figures; `unit` follows each. With `base`, the figures are also shown as multiples
    of that row's."""

    title: str
    unit: str
    rows: Sequence[Row]
    base: str | None = None

    def table(self) -> Table:
        """The rows as a table to print."""
        table = Table("", "published", "simulated", title=self.title)
        if self.base is not None:
            table.add_column(f"published, by {self.base}")
            table.add_column(f"simulated, by {self.base}")
        table.add_column("")
        for row in self.rows:
            cells = [_figure(row.theirs, self.unit), _figure(row.ours, self.unit)]
            if self.base is not None:
                base = next(each for each in self.rows if each.name == self.base)
                cells.append(_ratio(row.theirs, base.theirs))
                cells.append(_ratio(row.ours, base.ours))
            table.add_row(row.name, *cells, row.note)
        return table


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.2f}{unit}"


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}x"
