"""What the ranks of one host's CPUs share: memory for sums and hidden states."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.checkpoint.config import load_model_config
from engine.checkpoint.shard import Shard
from engine.native.library import KernelsUnavailable, load_library
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import RankMemory, RankSizes
from kv_transfer.transports.memory_file import SharedMemory
from protocol.errors import ConfigError
from worker.ranks.link import Place, mesh_of
from worker.ranks.processes import HandSettings

_WIDEST_BYTES = 4  # the most bytes of one number in a hidden state


def kernels_of_ranks(prebuilt: Path | None) -> ctypes.CDLL:
    """Our kernels, from the folder `prebuilt` if there is one; they may have to be built. Raises
    ConfigError."""
    try:
        return load_library(prebuilt=prebuilt)
    except KernelsUnavailable as error:
        raise ConfigError(f"several ranks on a CPU need our own kernels: {error}") from error


class HostRanks:
    """The memory, and the connections to ranks on other hosts."""

    def __init__(self, settings: HandSettings, limit_s: float) -> None:
        """A step waits `limit_s` for a rank. Raises ConfigError without our kernels, and
        ModelLoadError."""
        kernels = kernels_of_ranks(settings.config.kernels_dir)
        self.sizes = sizes = _sizes(settings)
        self._memory = SharedMemory(sizes.num_bytes)
        self._shared = RankMemory(kernels, memoryview(self._memory.view), sizes)
        self._limit_s = limit_s
        self._address = settings.address
        self.place, self.file = Place.of(self._memory), self._memory.file

    def ranks(
        self, own: Shard, links: Sequence[socket.socket], on_loaded: Callable[[], None]
    ) -> Ranks:
        """The ranks, seen from the head. Waits for those on other hosts, if there are any. Raises
        ConfigError and RankLost."""
        mesh = mesh_of(self._address, own, self.sizes, links, self._limit_s)
        return self._shared.ranks(own, links, self._limit_s, mesh)

    def times_of(self, numbers: range) -> list[int]:
        """The times of these ranks so far, as `RankTimes.note` takes them."""
        return self._shared.times_of(numbers)

    def stop(self) -> None:
        """End all waits of all ranks."""
        self._shared.stop()

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()


def _sizes(settings: HandSettings) -> RankSizes:
    """The shared memory's sizes. Raises ModelLoadError."""
    limits = settings.config.scheduler
    num_tokens = limits.chunk_max_tokens + limits.max_batch_size
    hidden_size = load_model_config(settings.config.folder).hidden_size
    step_bytes = num_tokens * hidden_size * _WIDEST_BYTES
    return RankSizes(settings.size, settings.num_stages, step_bytes, settings.num_hosts)
