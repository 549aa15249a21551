"""Which part of a model a rank has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """A rank's part of a model. The model's layers are divided into `num_stages` stages, and each
    stage into `size` equal parts. The rank has part `rank` of stage `stage`."""

    rank: int
    size: int
    stage: int = 0
    num_stages: int = 1

    @staticmethod
    def numbered(number: int, size: int, num_stages: int) -> Shard:
        """The part of rank `number` of a worker, whose rank 0 is in the last stage; see
        `KvLayout`."""
        stages_after, rank = divmod(number, size)
        return Shard(rank, size, num_stages - 1 - stages_after, num_stages)

    @property
    def number(self) -> int:
        """The rank's number among all ranks of its worker."""
        return (self.num_stages - 1 - self.stage) * self.size + self.rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the worker."""
        return self.size * self.num_stages

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the model's parts. Only its loader warns about the
        checkpoint."""
        return self.stage == 0 and self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        """Whether this part embeds the tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this part computes the logits."""
        return self.stage == self.num_stages - 1
