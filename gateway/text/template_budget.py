"""A sandbox for chat templates that also bounds their work.

Jinja's sandbox keeps a template from reaching Python, but lets it loop over ranges within ranges,
double a text forty times or compute 9**9**9. Here a rendering has a budget of steps (iterations,
calls) and of characters (every text that it writes or joins on its way), and no number or width
may be huge. A template that knows which text to look for can still waste time inside single
operations; `gateway.checkpoint_trial` finds those that do so with any conversation.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
MAX_CHARS = 1 << 27
MAX_WIDTH = 100_000
_MAX_BITS = 4096
_MACRO_STEPS = 10
_EACH, _SIZED, _LITERAL = "each one", "sized one", "literal one"  # no names for templates to write
_COUNTED_AT_ONCE = (list, tuple, dict)  # isinstance() is faster with a tuple than with a union
_SIZED_TYPES = (str, list, tuple)
_METHODS = frozenset(dir(dict))
_WIDTH = re.compile(r"\*|\d{5,}")


class BudgetExceeded(jinja2.TemplateRuntimeError):
    """A rendering does more than any chat template needs to."""


class Budget:
    """What one rendering may still do. Raises BudgetExceeded."""

    __slots__ = ("_chars", "_steps")

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._chars = MAX_CHARS

    def step(self, num_steps: int = 1) -> None:
        """Count an iteration or a call."""
        self._steps -= num_steps
        if self._steps < 0:
            raise BudgetExceeded(f"the chat template takes more than {MAX_STEPS} steps")

    def write(self, num_chars: int) -> None:
        """Count characters of a text, or items of a list, before or after it is made."""
        self._chars -= num_chars
        if self._chars < 0:
            raise BudgetExceeded(f"the chat template writes more than {MAX_CHARS} characters")


CURRENT: ContextVar[Budget] = ContextVar("baton_template_budget")
"""The budget of the rendering in this thread."""


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

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter whose arguments and results count."""
        self.filters[name] = _bounded(function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            weight = nodes.Const(_num_chars(loop))
            loop.iter = nodes.Filter(loop.iter, _EACH, [weight], [], None, None, lineno=loop.lineno)
        for joined in template.find_all(nodes.Concat):
            joined.nodes = [_sized_node(each) for each in joined.nodes]
        for output in template.find_all(nodes.Output):
            output.nodes = [_sized_node(each) for each in output.nodes]
        for added in template.find_all(nodes.Add):
            added.left, added.right = _sized_node(added.left), _sized_node(added.right)
        for macro in template.find_all(nodes.Macro):
            macro.body.insert(0, _written(_num_chars(macro), macro.lineno))
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, method or macro for a template."""
        CURRENT.get().step(_MACRO_STEPS if isinstance(__obj, Macro) else 1)
        _check_arguments(__obj, args, kwargs)
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
        if found is not None:
            _check_widths(value.__self__)
        return found

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply one of `intercepted_binops`."""
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif isinstance(left, str):
            _check_widths(left)
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


@jinja2.pass_context  # which also keeps it from being computed when the template is compiled
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
def _literal(context: Context, nothing: str, num_chars: int) -> str:
    CURRENT.get().write(num_chars)
    return nothing


def _sized_node(node: nodes.Expr) -> nodes.Expr:
    """The node with its value's size counted, unless its parts or their results count anyway."""
    if not isinstance(node, nodes.Name | nodes.Getattr | nodes.Getitem | nodes.CondExpr):
        return node
    return nodes.Filter(node, _SIZED, [], [], None, None, lineno=node.lineno)


def _written(num_chars: int, lineno: int) -> nodes.Output:
    """A statement that counts literal characters and outputs nothing."""
    return nodes.Output([nodes.Filter(nodes.Const(""), _LITERAL, [nodes.Const(num_chars)], [], None,
                                      None, lineno=lineno)], lineno=lineno)  # fmt: skip


def _num_chars(part: nodes.Node) -> int:
    """The characters of literal text in a part of a template."""
    return sum(len(each.data) for each in part.find_all(nodes.TemplateData))


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(function, args, kwargs)
        return _checked(function(*args, **kwargs))

    return bounded


def _checked(value: Any) -> Any:
    if isinstance(value, str):
        budget = CURRENT.get(None)
        if budget is not None:  # None: a constant, computed when the template is compiled
            budget.write(len(value))
    return value


def _check_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_WIDTH and function is not range:
            raise BudgetExceeded(f"the chat template uses the number {str(value)[:20]} as a size")
    name = getattr(function, "__name__", "")
    if name in ("replace", "do_replace", "join", "do_join", "do_format"):
        _check_text_method(name.removeprefix("do_"), function, args)


def _check_text_method(name: str, function: Any, args: tuple[Any, ...]) -> None:
    """Bound the results of methods (and filters of the same name) that multiply texts."""
    texts = [each for each in (getattr(function, "__self__", None), *args) if each is not None]
    if name == "replace":
        strings = [each for each in texts if isinstance(each, str)]
        if len(strings) >= 3:
            text, old, new = strings[:3]
            CURRENT.get().write(text.count(old) * len(new))
    elif name == "join":
        for each in texts:
            if isinstance(each, list | tuple):
                CURRENT.get().write(sum(len(part) for part in each if isinstance(part, str)))
    else:
        for each in texts:
            if isinstance(each, str):
                _check_widths(each)


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
