"""Which fields of a request were shown to change something, and by what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Check = Callable[[Any], None]


class Shown(dict[str, Check]):
    """By field: what shows its effect, through whatever asks for the test."""

    def by(self, *fields: str) -> Callable[[Check], Check]:
        """Registers what shows the effect of some fields."""

        def register(check: Check) -> Check:
            self.update(dict.fromkeys(fields, check))
            return check

        return register
