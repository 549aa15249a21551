"""Loads NIXL's Python module: the build for this process's device. Knows no agents."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from types import ModuleType

from protocol.errors import ConfigError

NIXL_MODULES = ("nixl_cu12", "nixl_cu13")


def load_nixl(device: str) -> ModuleType:
    """NIXL's module; for a card the build for torch's CUDA is preferred. Raises ConfigError."""
    if sys.platform != "linux":
        raise ConfigError("the nixl transport runs on Linux only; use the transport shm")
    reasons = []
    names = NIXL_MODULES if device == "cpu" else card_modules(cuda_of_torch())
    for name in sorted(names, key=lambda name: name not in sys.modules):  # one build per process
        try:
            return _import_quietly(name)
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
    raise ConfigError(f"nixl cannot be loaded: {'; '.join(reasons)}")


def card_modules(cuda: str | None) -> Sequence[str]:
    """The builds of NIXL for a card, in the order in which to try them. `cuda` is the CUDA version
    of the process; None: not known, treated as 13."""
    is_old = cuda is not None and cuda.split(".")[0] == "12"
    return NIXL_MODULES if is_old else NIXL_MODULES[::-1]


def cuda_of_torch() -> str | None:
    """The CUDA version for which this process's torch was built; None without torch, which this
    package does not import."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.version.cuda


def _import_quietly(name: str) -> ModuleType:
    """Import NIXL and undo its changes to the process's logging."""
    if sys.modules.get(name) is not None:
        return sys.modules[name]
    raise_exceptions = logging.raiseExceptions
    try:
        module = importlib.import_module(name)
    finally:
        logging.raiseExceptions = raise_exceptions
    logger = logging.getLogger("nixl")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    return module


def error_types(nixl: ModuleType) -> tuple[type[Exception], ...]:
    """Every exception that NIXL's binding declares, and RuntimeError for native failures."""
    bindings = importlib.import_module(f"{nixl.__name__}._bindings")
    declared = [
        value
        for value in vars(bindings).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    return (*declared, RuntimeError)
