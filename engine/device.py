"""Torch devices and dtypes by their names in configuration and on the wire, and fences to wait for
a device. A card runs its work asynchronously, in order; a CPU has finished when the call returns.
"""

from __future__ import annotations

import torch

from engine.fences import PASSED, Fence
from engine.host_memory import available_memory
from protocol.errors import ConfigError
from protocol.layout import DTYPE_BYTES, FP8


def pick_device(name: str) -> torch.device:
    """The device of this name; `auto` is CUDA if there is a card, else CPU. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name} was asked for, but torch sees no CUDA card; use cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def torch_dtype(name: str) -> torch.dtype:
    """Torch's dtype for `float32`, `bfloat16` or `float16`; ConfigError for any other name."""
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPE_BYTES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def kv_torch_dtype(name: str) -> torch.dtype:
    """The dtype of a KV pool, which may be fp8; ConfigError for an unknown name."""
    return torch.float8_e4m3fn if name == FP8 else torch_dtype(name)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype in configuration and layouts."""
    return str(dtype).removeprefix("torch.")


def bind_thread(device: torch.device) -> None:
    """Bind the calling thread to a card.

    Torch binds threads that call it; libraries below torch (UCX) assume that an unbound thread
    uses no card, or the first one.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # the first call that needs the card's context binds it


def available_bytes(device: torch.device) -> int:
    """Free memory for `device` in bytes: the card's, or what the host has for this process."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    return available_memory()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `tensor` from host memory to `device`; does not wait for a copy to a card."""
    if device.type == "cpu":
        return tensor
    if tensor.numel() == 0:  # nothing to pin
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy `tensor` to host memory. A copy from a card is complete once a later fence is passed."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until a card has finished the work on the current stream; returns at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class CardFence:
    """An event behind all work queued so far on a card's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def is_done(self) -> bool:
        """See Fence. Raises RuntimeError when the card has failed."""
        return bool(self._event.query())

    def wait(self) -> None:
        """See Fence."""
        self._event.synchronize()


def fence_of(device: torch.device) -> Fence:
    """A fence behind all work that this thread has queued on `device`."""
    return CardFence(device) if device.type == "cuda" else PASSED
