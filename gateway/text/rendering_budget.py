"""Limits how many steps one rendering of a chat template takes and how many characters it makes."""

from __future__ import annotations

from contextvars import ContextVar

import jinja2

MAX_STEPS = 1_000_000
MAX_CHARS = 1 << 27


class BudgetExceeded(jinja2.TemplateRuntimeError):
    """A rendering does more than any chat template needs to."""


class Budget:
    """The steps and characters left to one rendering. Raises BudgetExceeded when none are left."""

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
