"""A sandbox for chat templates that also bounds their work.

Jinja's sandbox keeps a template from reaching Python, but lets it loop over ranges within ranges,
double a text forty times or compute 9**9**9. Here a rendering has a budget of steps (iterations,
calls, and all that lists hold which become text or are compared) and of characters (every text that
it reads, writes or joins on its way, counted before it is made), and no number or width may be
huge. A template can still waste time inside a single operation on a text that it was written for;
`gateway.checkpoint_trial` finds templates that do so with any conversation.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from gateway.text.rendering_budget import CURRENT, BudgetExceeded

MAX_WIDTH = 100_000
_MAX_BITS = 4096
_MACRO_STEPS = 10
_EACH, _SIZED, _LITERAL, _DEEP, _SHOWN = "1 each", "1 sized", "1 literal", "1 deep", "1 shown"
"""Names that no template can write."""
_COUNTED_AT_ONCE = (list, tuple, dict)  # isinstance() is faster with a tuple than with a union
_SIZED_TYPES = (str, list, tuple)
_CONTAINERS: tuple[type, ...] = (
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
_SHALLOW = frozenset(
    (
        "length", "count", "first", "last", "default", "d", "map", "select", "reject", "selectattr",
        "rejectattr", "items", "attr",
    )
)  # fmt: skip
"""Filters that read only the first level of their input."""
_REFUSED = frozenset(
    (
        "urlize", "pprint", "wordwrap", "xmlattr", "translate", "maketrans", "expandtabs",
        "format_map",
    )
)  # fmt: skip
"""Filters and methods that no chat template needs, and whose results are hard to bound."""
_COSTLY = frozenset(("list", "title", "urlencode", "striptags", "wordcount", "sort", "unique"))
"""Filters that take a text apart: each character costs as much as `_SCALAR_CHARS`."""
_METHODS = frozenset(dir(dict))
_PLAIN = (nodes.Const, nodes.TemplateData)
_VALUES = (nodes.Name, nodes.Getattr, nodes.Getitem, nodes.CondExpr)
_NOT_VALUES = (Context, nodes.EvalContext, jinja2.Environment)
_WIDTH = re.compile(r"\*|\d{5,}")


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. Renderings need a budget in `CURRENT`."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        for name, function in self.filters.items():
            self.add_filter(name, function)
        self.filters[_EACH] = _each
        self.filters[_SIZED] = _sized
        self.filters[_LITERAL] = _literal
        self.filters[_DEEP] = _deep
        self.filters[_SHOWN] = _shown

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter whose arguments and results count."""
        self.filters[name] = _bounded(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            weight = nodes.Const(_num_chars(loop))
            loop.iter = nodes.Filter(loop.iter, _EACH, [weight], [], None, None, lineno=loop.lineno)
        for joined in template.find_all(nodes.Concat):
            joined.nodes = [_shown_node(each) for each in joined.nodes]
        for output in template.find_all(nodes.Output):
            output.nodes = [_shown_node(each) for each in output.nodes]
        for added in template.find_all(nodes.Add):
            added.left, added.right = _sized_node(added.left), _sized_node(added.right)
        for compared in template.find_all(nodes.Compare):
            if not any(isinstance(each, _PLAIN) for each in (compared.expr, compared.ops[0].expr)):
                compared.expr = _deep_node(compared.expr)
                for operand in compared.ops:
                    operand.expr = _deep_node(operand.expr)
        for pair in template.find_all(nodes.Pair):
            pair.key = _deep_node(pair.key)  # to be hashed
        for macro in template.find_all(nodes.Macro):
            macro.body.insert(0, _written(_num_chars(macro), macro.lineno))
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, method or macro for a template."""
        CURRENT.get().step(_MACRO_STEPS if isinstance(__obj, Macro) else 1)
        _check_sizes(__obj, args, kwargs)
        if not isinstance(__obj, Macro | LoopContext | type):
            args = _with_lists(args)
            own = getattr(__obj, "__self__", None)
            name = getattr(__obj, "__name__", "")
            _check_work(name, [] if own is None else [own], args, kwargs, is_method=True)
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item for a template. Without this short cut, the sandbox raises and catches two errors
        for each field that a message lacks."""
        if type(obj) is dict and type(argument) is str and argument not in _METHODS:
            return obj[argument] if argument in obj else self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute for a template, or else an item."""
        if type(obj) is dict and attribute not in _METHODS:
            return self.getitem(obj, attribute)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandboxed `format` of a text; None for any other value."""
        found = super().wrap_str_format(value)
        if found is None:
            return None
        pattern: str = value.__self__
        _check_widths(pattern)

        @functools.wraps(found)
        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(pattern, [*args, *kwargs.values()])
            return found(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply one of `intercepted_binops`."""
        if operator == "*":
            _check_product(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
            _check_format(left, [right])
        elif operator == "**":
            _check_power(left, right)
        return _checked(super().call_binop(context, operator, left, right))


class _Counted:
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


@jinja2.pass_context  # this also keeps the result from being computed when the template is compiled
def _each(context: Context, items: Any, weight: int) -> Any:
    if isinstance(items, _COUNTED_AT_ONCE):
        budget, count = CURRENT.get(), len(items)
        budget.step(count)
        if weight:
            budget.write(count * weight)
        return items
    return _Counted(items, weight)


@jinja2.pass_context
def _sized(context: Context, value: Any) -> Any:
    if isinstance(value, _SIZED_TYPES):
        CURRENT.get().write(len(value))
    return value


@jinja2.pass_context
def _deep(context: Context, value: Any) -> Any:
    if isinstance(value, _CONTAINERS):
        _measure(value)
    return value


@jinja2.pass_context
def _shown(context: Context, value: Any) -> Any:
    if type(value) is str:  # nearly every value
        CURRENT.get().write(len(value))
        return value
    return _deep(context, _sized(context, value))


@jinja2.pass_context
def _literal(context: Context, nothing: str, num_chars: int) -> str:
    CURRENT.get().write(num_chars)
    return nothing


def _sized_node(node: nodes.Expr) -> nodes.Expr:
    """The node with its value's size counted, unless its parts or their results count anyway."""
    is_value = isinstance(node, _VALUES)
    return nodes.Filter(node, _SIZED, [], [], None, None, lineno=node.lineno) if is_value else node


def _shown_node(node: nodes.Expr) -> nodes.Expr:
    """The node of a value that becomes text, counted as by `_sized_node` and `_deep_node`."""
    if not isinstance(node, _VALUES):
        return _deep_node(node)
    return nodes.Filter(node, _SHOWN, [], [], None, None, lineno=node.lineno)


def _written(num_chars: int, lineno: int) -> nodes.Output:
    """A statement that counts literal characters and outputs nothing."""
    return nodes.Output([nodes.Filter(nodes.Const(""), _LITERAL, [nodes.Const(num_chars)], [], None,
                                      None, lineno=lineno)], lineno=lineno)  # fmt: skip


def _num_chars(part: nodes.Node) -> int:
    """The characters of literal text in a part of a template."""
    return sum(len(each.data) for each in part.find_all(nodes.TemplateData))


def _deep_node(node: nodes.Expr) -> nodes.Expr:
    """The node, changed so that all parts of its value that become text or are compared count, on
    all levels."""
    if isinstance(node, _PLAIN):
        return node
    return nodes.Filter(node, _DEEP, [], [], None, None, lineno=node.lineno)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if CURRENT.get(None) is None:  # a constant, which is not computed at compile time
            raise nodes.Impossible
        _check_sizes(function, args, kwargs)
        if name not in _SHALLOW:
            args = _with_lists(args)
            values = [each for each in args if not isinstance(each, _NOT_VALUES)]
            _check_work(name, values[:1], values[1:], kwargs)
        return _checked(function(*args, **kwargs))

    return bounded


def _checked(value: Any) -> Any:
    if isinstance(value, _SIZED_TYPES):
        budget = CURRENT.get(None)
        if budget is not None:  # None: a constant, computed when the template is compiled
            budget.write(len(value) * (1 if isinstance(value, str) else _SCALAR_CHARS))
    return value


def _with_lists(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with lists instead of iterators and ranges; each item is a step."""
    return tuple(
        list(_Counted(each, 0)) if isinstance(each, Iterator | range) else each for each in args
    )


def _check_sizes(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_WIDTH and function is not range:
            raise BudgetExceeded(f"the chat template uses the number {str(value)[:20]} as a size")


def _check_work(
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
            _measure(each)
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
        _check_widths(text)
        _check_format(text, values[1:])
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
        CURRENT.get().write(sum(map(_measure, items)))


def _check_format(pattern: str, values: Sequence[Any]) -> None:
    count = pattern.count("%") + pattern.count("{")
    CURRENT.get().write(count * max(map(_measure, values), default=0))


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
    CURRENT.get().write(_measure(value) // _SCALAR_CHARS * widest)


def _measure(value: Any) -> int:
    """About how many characters a value has as text; each item of what it holds is a step."""
    if isinstance(value, str):
        return len(value)
    chars = _SCALAR_CHARS
    if not isinstance(value, _CONTAINERS):
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
            elif isinstance(each, _CONTAINERS):
                waiting.append(each)
            chars += _SCALAR_CHARS
    budget.write(chars)
    return chars


def _check_widths(pattern: str) -> None:
    if _WIDTH.search(pattern) and len(pattern) < MAX_WIDTH and re.search(r"[%{]", pattern):
        raise BudgetExceeded("the chat template formats a text with a huge or computed width")


def _check_product(left: Any, right: Any) -> None:
    for items, count in ((left, right), (right, left)):
        if isinstance(items, str | list | tuple) and isinstance(count, int):
            CURRENT.get().write(len(items) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise BudgetExceeded(f"the chat template computes a number of more than {_MAX_BITS} bits")
