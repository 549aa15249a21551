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
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.text.rendering_budget import CURRENT
from gateway.text.template_costs import (
    CONTAINERS,
    SIZED_TYPES,
    Counted,
    check_format,
    check_power,
    check_product,
    check_sizes,
    check_widths,
    check_work,
    counted_result,
    measure,
    with_lists,
)

_MACRO_STEPS = 10
_EACH, _SIZED, _LITERAL, _DEEP, _SHOWN = "1 each", "1 sized", "1 literal", "1 deep", "1 shown"
"""Names that no template can write."""
_COUNTED_AT_ONCE = (list, tuple, dict)  # isinstance() is faster with a tuple than with a union
_SHALLOW = frozenset(
    (
        "length", "count", "first", "last", "default", "d", "map", "select", "reject", "selectattr",
        "rejectattr", "items", "attr",
    )
)  # fmt: skip
"""Filters that read only the first level of their input."""
_METHODS = frozenset(dir(dict))
_PLAIN = (nodes.Const, nodes.TemplateData)
_VALUES = (nodes.Name, nodes.Getattr, nodes.Getitem, nodes.CondExpr)
_NOT_VALUES = (Context, nodes.EvalContext, jinja2.Environment)


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
        check_sizes(__obj, args, kwargs)
        if not isinstance(__obj, Macro | LoopContext | type):
            args = with_lists(args)
            own = getattr(__obj, "__self__", None)
            name = getattr(__obj, "__name__", "")
            check_work(name, [] if own is None else [own], args, kwargs, is_method=True)
        return counted_result(super().call(__context, __obj, *args, **kwargs))

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
        check_widths(pattern)

        @functools.wraps(found)
        def bounded(*args: Any, **kwargs: Any) -> str:
            check_format(pattern, [*args, *kwargs.values()])
            return found(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply one of `intercepted_binops`."""
        if operator == "*":
            check_product(left, right)
        elif operator == "%" and isinstance(left, str):
            check_widths(left)
            check_format(left, [right])
        elif operator == "**":
            check_power(left, right)
        return counted_result(super().call_binop(context, operator, left, right))


@jinja2.pass_context  # this also keeps the result from being computed when the template is compiled
def _each(context: Context, items: Any, weight: int) -> Any:
    if isinstance(items, _COUNTED_AT_ONCE):
        budget, count = CURRENT.get(), len(items)
        budget.step(count)
        if weight:
            budget.write(count * weight)
        return items
    return Counted(items, weight)


@jinja2.pass_context
def _sized(context: Context, value: Any) -> Any:
    if isinstance(value, SIZED_TYPES):
        CURRENT.get().write(len(value))
    return value


@jinja2.pass_context
def _deep(context: Context, value: Any) -> Any:
    if isinstance(value, CONTAINERS):
        measure(value)
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
        check_sizes(function, args, kwargs)
        if name not in _SHALLOW:
            args = with_lists(args)
            values = [each for each in args if not isinstance(each, _NOT_VALUES)]
            check_work(name, values[:1], values[1:], kwargs)
        return counted_result(function(*args, **kwargs))

    return bounded
