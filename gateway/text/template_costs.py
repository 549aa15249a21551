"""What the operations of a chat template cost: what they read and make, counted before it is made.

Costs count against the budget in `CURRENT`; what can be huge or has no bound is refused. Every
function raises BudgetExceeded. Knows no environment of Jinja.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2.utils import Namespace

from gateway.text.rendering_budget import CURRENT, BudgetExceeded

_MAX_WIDTH = 100_000
_MAX_BITS = 4096
SIZED_TYPES = (str, list, tuple)
CONTAINERS: tuple[type, ...] = (
    list,
    tuple,
    dict,
    Namespace,
    type({}.items()),
    type({}.keys()),
    type({}.values()),
)
_SCALAR_CHARS = 8
_SCAN_SHIFT = 4
"""Reading a text costs as much as writing a text `2**_SCAN_SHIFT` times shorter."""
_REFUSED = frozenset(
    (
        "urlize", "pprint", "wordwrap", "xmlattr", "translate", "maketrans", "expandtabs",
        "format_map",
    )
)  # fmt: skip
"""Filters and methods that no chat template needs, and whose results are hard to bound."""
_COSTLY = frozenset(("list", "title", "urlencode", "striptags", "wordcount", "sort", "unique"))
"""Filters that take a text apart: each character costs as much as `_SCALAR_CHARS`."""
_WIDTH = re.compile(r"\*|\d{5,}")


class Counted:
    """An iterable whose items are steps, each of which writes `weight` characters."""

    def __init__(self, items: Any, weight: int) -> None:
        self._items = items
        self._weight = weight

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        budget, weight = CURRENT.get(), self._weight
        for item in self._items:
            budget.step()
            budget.write(weight)
            yield item


def counted_result(value: Any) -> Any:
    """The result of an operation, whose size counts."""
    if isinstance(value, SIZED_TYPES):
        budget = CURRENT.get(None)
        if budget is not None:  # None: a constant, computed when the template is compiled
            budget.write(len(value) * (1 if isinstance(value, str) else _SCALAR_CHARS))
    return value


def with_lists(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with lists instead of iterators and ranges; each item is a step."""
    return tuple(
        list(Counted(each, 0)) if isinstance(each, Iterator | range) else each for each in args
    )


def check_sizes(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse numbers that are too large as sizes, unless a range has them."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _MAX_WIDTH and function is not range:
            raise BudgetExceeded(f"the chat template uses the number {str(value)[:20]} as a size")


def check_work(
    name: str,
    own: Sequence[Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    is_method: bool = False,
) -> None:
    """Count what a filter or method, applied to the value in `own`, reads and makes."""
    if name in _REFUSED:
        raise BudgetExceeded(f"the chat template uses '{name}', which is not offered")
    budget = CURRENT.get()
    values = [*own, *args, *kwargs.values()]
    for each in values:
        if isinstance(each, str):
            weight = _SCALAR_CHARS << _SCAN_SHIFT if name in _COSTLY else 1
            budget.write(len(each) * weight >> _SCAN_SHIFT)
        else:
            measure(each)
    text = own[0] if own else ""
    if name == "sum" and not isinstance(
        kwargs.get("start", args[1] if args[1:] else 0), int | float
    ):
        raise BudgetExceeded("the chat template adds values that are not numbers")
    if name == "join":
        given = args[0] if args else kwargs.get("d", "")
        if is_method:
            text, given = given, text
        _check_join(text, given)
    elif name in ("format", "%") and isinstance(text, str):
        check_widths(text)
        check_format(text, values[1:])
    elif name == "replace" and isinstance(text, str):
        old, new = [*args, *kwargs.values()][:2] if len(values) > 2 else ("", "")
        budget.write(text.count(str(old)) * len(str(new)))
    elif name == "indent" and isinstance(text, str):
        width = max((len(e) if isinstance(e, str) else int(e) for e in values[1:]
                     if isinstance(e, str | int)), default=4)  # fmt: skip
        budget.write((text.count("\n") + 1) * width)
    elif name in ("batch", "slice"):
        budget.write(sum(each for each in values if isinstance(each, int)))
    elif name == "tojson":
        _check_json(text, values[1:])


def _check_join(items: Any, separator: Any) -> None:
    if isinstance(separator, str) and hasattr(items, "__len__"):
        CURRENT.get().write(len(items) * len(separator))
    if isinstance(items, list | tuple):
        CURRENT.get().write(sum(map(measure, items)))


def check_format(pattern: str, values: Sequence[Any]) -> None:
    """Count the values as often as a pattern may name them."""
    count = pattern.count("%") + pattern.count("{")
    CURRENT.get().write(count * max(map(measure, values), default=0))


def _check_json(value: Any, options: Sequence[Any]) -> None:
    """Separators and indentation are written for each item, on as many levels as there may be."""
    widest = 0
    for each in options:
        if isinstance(each, str):
            widest += len(each)
        elif isinstance(each, int):
            widest += each
        elif isinstance(each, list | tuple):
            widest += sum(len(part) for part in each if isinstance(part, str))
    CURRENT.get().write(measure(value) // _SCALAR_CHARS * widest)


def measure(value: Any) -> int:
    """About how many characters a value has as text; each item of what it holds is a step."""
    if isinstance(value, str):
        return len(value)
    chars = _SCALAR_CHARS
    if not isinstance(value, CONTAINERS):
        return chars
    budget = CURRENT.get()
    waiting: list[Any] = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Namespace):
            found = object.__getattribute__(found, "_Namespace__attrs")
        items: Any = [*found, *found.values()] if isinstance(found, dict) else found
        budget.step(len(items))
        for each in items:
            if isinstance(each, str):
                chars += _SCALAR_CHARS + len(each)
            elif isinstance(each, CONTAINERS):
                waiting.append(each)
            chars += _SCALAR_CHARS
    budget.write(chars)
    return chars


def check_widths(pattern: str) -> None:
    """Refuse a pattern with a huge or computed width."""
    if _WIDTH.search(pattern) and len(pattern) < _MAX_WIDTH and re.search(r"[%{]", pattern):
        raise BudgetExceeded("the chat template formats a text with a huge or computed width")


def check_product(left: Any, right: Any) -> None:
    """Count a repeated text or list; refuse a huge number."""
    for items, count in ((left, right), (right, left)):
        if isinstance(items, str | list | tuple) and isinstance(count, int):
            CURRENT.get().write(len(items) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def check_power(left: Any, right: Any) -> None:
    """Refuse a huge number."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise BudgetExceeded(f"the chat template computes a number of more than {_MAX_BITS} bits")
