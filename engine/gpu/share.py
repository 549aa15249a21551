"""A share of a card's multiprocessors for this process, by CUDA's Multi-Process Service (MPS).

Without it, processes on one card take turns, a time slice each. Where its daemon runs their kernels
run side by side, and each process may be held to a share of the multiprocessors: a decode worker
keeps its latency while a prefill worker computes beside it. CUDA reads the share once, when it
starts in a process. Calls are those of https://docs.nvidia.com/deploy/mps/.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from protocol.errors import ConfigError

_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_PIPES = "/tmp/nvidia-mps"


def limit_to_share(fraction: float, environment: MutableMapping[str, str]) -> None:
    """Hold CUDA, which has not started in this process, to `fraction` (0 to 1) of each card.

    `environment` is the process's own. Raises ConfigError where no MPS daemon has its pipes, and
    where the environment already says another share.
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
