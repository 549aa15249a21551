"""Limits this process to a share of a card's multiprocessors with CUDA's Multi-Process Service
(MPS).

Without MPS, processes on one card take turns in time slices. With the MPS daemon, their kernels run
side by side, and each process can be limited to a share of the multiprocessors. So a decode worker
keeps its latency while a prefill worker computes on the same card. CUDA reads the share once, when
it starts in a process. See https://docs.nvidia.com/deploy/mps/.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from protocol.errors import ConfigError

_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_PIPES = "/tmp/nvidia-mps"


def limit_to_share(fraction: float, environment: MutableMapping[str, str]) -> None:
    """Limit this process to `fraction` (0 to 1) of each card. Call this before CUDA starts.

    `environment` is the process's own. Raises ConfigError if no MPS daemon has its pipes there, or
    if the environment already sets another share.
    """
    share = f"{100 * fraction:g}"
    pipes = Path(environment.get(_PIPES, _DEFAULT_PIPES))
    if not (pipes / "control").exists():
        raise ConfigError(
            f"sm_fraction {fraction:g} needs CUDA's MPS, and no daemon has its pipes in {pipes}: "
            "start nvidia-cuda-mps-control -d, or leave sm_fraction out"
        )
    said = environment.setdefault(_SHARE, share)
    if said != share:
        raise ConfigError(f"sm_fraction {fraction:g} is not what {_SHARE} says, {said}")
