"""Sums of small tensors through memory that every card of a stage maps: torch's symmetric memory.

NCCL's latency dominates the sums of a decode step. Here each card reads the others' parts itself,
in one kernel: either all parts completely (`one_shot`), or first a slice of each part and then the
sums of the other slices (`two_shot`). The fastest way depends on cards and links. So the ways are
measured once, when ranks meet, and all ranks use the slowest rank's times. Graphs may capture these
sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist

NCCL, ONE_SHOT, TWO_SHOT = "nccl", "one_shot", "two_shot"
AUTO, SYMMETRIC = "auto", "symmetric"
SIZES = tuple(1 << bits for bits in range(13, 23))
"""Bytes of the sums that are measured, up to those of the buffer."""
_DTYPES = (torch.float32, torch.bfloat16)
_ALIGNMENT = 16  # bytes that a thread reads at once from each rank's slice
_WARM_UP, _ROUNDS = 5, 20

Way = Callable[[torch.Tensor], None]
"""Replaces a part by the sum of all ranks' parts."""


class SymmetricSums:
    """The ways to add up on a card that is one of `group`; they share one buffer and one stream."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks of the group call this together, once `why_not_reached` gives
        none of them a reason. Raises RuntimeError where the driver refuses."""
        import torch.distributed._symmetric_memory as symmetric

        self._group = group
        self._buffer = symmetric.empty(SIZES[-1], dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._buffer, group)
        self.ways: Mapping[str, Way] = {
            NCCL: self._by_nccl,
            ONE_SHOT: self._one_shot,
            TWO_SHOT: self._two_shot,
        }

    def seconds(self, name: str, size: int) -> float:
        """The card's time for one sum of `size` bytes."""
        part = torch.zeros(size // 2, dtype=torch.bfloat16, device=self._buffer.device)
        for _ in range(_WARM_UP):
            self.ways[name](part)
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        for _ in range(_ROUNDS):
            self.ways[name](part)
        ended.record()
        ended.synchronize()
        return float(started.elapsed_time(ended)) / 1e3 / _ROUNDS

    def fits(self, part: torch.Tensor) -> bool:
        """Whether the buffer and its kernels take a part of this size and type."""
        size = _ALIGNMENT * self._group.size()
        return part.nbytes <= SIZES[-1] and part.dtype in _DTYPES and part.nbytes % size == 0

    def _by_nccl(self, part: torch.Tensor) -> None:
        dist.all_reduce(part, group=self._group)

    def _one_shot(self, part: torch.Tensor) -> None:
        own = self._copied(part)
        part.copy_(torch.ops.symm_mem.one_shot_all_reduce(own, "sum", self._group.group_name))

    def _two_shot(self, part: torch.Tensor) -> None:
        own = self._copied(part)
        torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", self._group.group_name)
        part.copy_(own)

    def _copied(self, part: torch.Tensor) -> torch.Tensor:
        own = self._buffer[: part.nbytes].view(part.dtype).view(part.shape)
        return own.copy_(part)


def why_not_reached(device: torch.device) -> str:
    """Why a card cannot map the memory of every other card that this process sees; "" if it can."""
    for other in range(torch.cuda.device_count()):
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            return f"{device} cannot map the memory of cuda:{other}"
    return ""


class ChosenSums:
    """For each size the way that `times` say is fastest. `times`: the seconds that each way takes
    for tensors of so many bytes, by rising sizes; larger tensors go by NCCL."""

    def __init__(self, times: Mapping[int, Mapping[str, float]]) -> None:
        self.by_size = [(size, min(each, key=each.__getitem__)) for size, each in times.items()]

    def way(self, num_bytes: int) -> str:
        """The way for tensors of so many bytes: that of the next larger size."""
        return next((way for size, way in self.by_size if num_bytes <= size), NCCL)

    def __str__(self) -> str:
        ends: dict[str, int] = {}
        for size, way in self.by_size:
            ends[way] = size
        return ", ".join(f"{way} to {size >> 10} KiB" for way, size in ends.items())


def measured(
    ways: Collection[str],
    wanted: str,
    seconds: Callable[[str, int], float],
    slowest: Callable[[Sequence[float]], Sequence[float]],
    sizes: Sequence[int] = SIZES,
) -> ChosenSums:
    """Time the ways, all ranks together: `seconds` of a way and a number of bytes. `wanted`:
    SYMMETRIC leaves NCCL out of the choice. `slowest` turns a rank's times into those of the
    slowest rank, equal on all ranks."""
    names = [name for name in ways if wanted != SYMMETRIC or name != NCCL]
    found = [seconds(name, size) for size in sizes for name in names]
    times = iter(slowest(found))
    return ChosenSums({size: {name: next(times) for name in names} for size in sizes})
