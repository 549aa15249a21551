"""Torch devices and dtypes by the names that configuration and the wire use."""

from __future__ import annotations

import psutil
import torch

from protocol.errors import ConfigError
from protocol.layout import DTYPE_BYTES


def torch_dtype(name: str) -> torch.dtype:
    """`float32`, `bfloat16` or `float16` as torch has it; ConfigError for another name."""
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPE_BYTES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


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
    return tensor.pin_memory().to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Until a card has done what it was given on the current stream; a CPU has always."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
