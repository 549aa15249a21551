"""Torch devices and dtypes by the names that configuration and the wire use, and how one waits for
a device: what a card is given it does later, in order; a CPU has done it when the call returns.
"""

from __future__ import annotations

from typing import Protocol

import psutil
import torch

from protocol.errors import ConfigError
from protocol.layout import DTYPE_BYTES, FP8


def torch_dtype(name: str) -> torch.dtype:
    """`float32`, `bfloat16` or `float16` as torch has it; ConfigError for another name."""
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPE_BYTES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def kv_torch_dtype(name: str) -> torch.dtype:
    """The dtype of a KV pool, which may have 8 bits; ConfigError for an unknown name."""
    return torch.float8_e4m3fn if name == FP8 else torch_dtype(name)


def bind_thread(device: torch.device) -> None:
    """Make a card the calling thread's own.

    Torch does so by itself where it is called; libraries below it (UCX) take a thread for one that
    uses no card, or the first.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # the first call that needs the card's context binds it


def available_bytes(device: torch.device) -> int:
    """Memory that `device` could still give out, in bytes: the card's, or the machine's."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, from host memory, on `device`; does not wait for a copy to a card."""
    if device.type == "cpu":
        return tensor
    if tensor.numel() == 0:  # nothing to pin
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in host memory; a card's copy of it is there once it has passed a later fence."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Until a card has done what it was given on the current stream; a CPU has always."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Fence(Protocol):
    """A point in what a device was given to do."""

    def is_done(self) -> bool:
        """Whether the device is past it; may be asked by any thread."""

    def wait(self) -> None:
        """Until the device is past it."""


class PassedFence:
    """The fence of a device that has nothing left to do."""

    def is_done(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Returns at once."""


class CardFence:
    """What a card was given on the current stream up to now, as an event behind it."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def is_done(self) -> bool:
        """See Fence. Raises RuntimeError when the card has failed."""
        return bool(self._event.query())

    def wait(self) -> None:
        """See Fence."""
        self._event.synchronize()


PASSED = PassedFence()


def fence_of(device: torch.device) -> Fence:
    """The fence behind all that `device` was given by this thread."""
    return CardFence(device) if device.type == "cuda" else PASSED
