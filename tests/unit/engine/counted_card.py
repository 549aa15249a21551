"""A device that has no memory, in the place of a card: it counts the copies that a step makes.

Tensors there have shapes and no numbers, so whatever waits for a card to read a number raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CountedCard(TorchFunctionMode):
    """While it is entered, copies to and from `device` are counted, and nothing is pinned."""

    device = torch.device("meta")

    def __init__(self) -> None:
        super().__init__()
        self.num_in = 0
        self.num_out = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to and self.device in (*args[1:], *kwargs.values()):
            self.num_in += args[0].device != self.device
        if func is torch.Tensor.copy_ and args[0].device != args[1].device:
            is_out = args[1].device == self.device
            self.num_out += is_out
            self.num_in += not is_out
            if is_out:
                return args[0]  # there is nothing to copy
        return func(*args, **kwargs)
