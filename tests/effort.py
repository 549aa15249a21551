"""How much a test tries: enough for every run, or all of it in `./scripts/nightly`."""

from __future__ import annotations

import itertools
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest
from allpairspy import AllPairs

NIGHTLY = os.environ.get("SUITE") == "nightly"
T = TypeVar("T")


def pairwise(names: str, *values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize over `values`, one iterable for each of `names` ("a, b, c"): every pair of two
    parameters' values occurs, but not every combination; nightly all combinations run."""
    columns = [list(each) for each in values]
    if NIGHTLY or len(columns) < 3:
        rows: list[Sequence[Any]] = list(itertools.product(*columns))
    else:
        numbered = AllPairs([list(range(len(column))) for column in columns])
        rows = [[column[i] for column, i in zip(columns, row, strict=True)] for row in numbered]
    return pytest.mark.parametrize(names, [tuple(row) for row in rows])


def in_turn(first: Iterable[Any], second: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Pairs of two parameters' values: each value of the longer one with one of the other's, in
    turn; nightly all pairs."""
    left, right = list(first), list(second)
    if NIGHTLY:
        return list(itertools.product(left, right))
    number = max(len(left), len(right))
    return [(left[i % len(left)], right[i % len(right)]) for i in range(number)]


def with_one_each(items: Iterable[pytest.Item], name: str) -> list[pytest.Item]:
    """Tests that only the nightly run executes. In everyday runs, each row of a table runs with one
    value of the parameter `name`. Rows take the values in turn, in an order that no other parameter
    follows. A test without rows runs with all values."""
    tables: dict[tuple[Any, str], dict[str, list[pytest.Item]]] = defaultdict(dict)
    for item in items:
        call = getattr(item, "callspec", None)
        if isinstance(item, pytest.Function) and call is not None and name in call.params:
            row = item.name.replace(str(call.params[name]), "", 1)
            tables[item.parent, item.originalname].setdefault(row, []).append(item)
    waiting: list[pytest.Item] = []
    for table in tables.values():
        rows = sorted(table.values(), key=lambda row: zlib.crc32(row[0].nodeid.encode()))
        for number, row in enumerate(rows if len(rows) > 1 else []):
            waiting += [item for i, item in enumerate(row) if i != number % len(row)]
    return waiting


def some(values: Iterable[T], number: int) -> list[T]:
    """`number` of the values, evenly spread with the first and the last; nightly all of them."""
    every = list(values)
    if NIGHTLY or len(every) <= number:
        return every
    steps = max(1, number - 1)
    return [every[round(i * (len(every) - 1) / steps)] for i in range(number)]


def times(everyday: int, nightly: int) -> int:
    """The number of repetitions, or of examples that hypothesis tries."""
    return nightly if NIGHTLY else everyday
