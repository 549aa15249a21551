"""The layout of a worker's KV pool, and its fingerprint, which two workers compare first."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated

import msgspec

from protocol.errors import ConfigError
from protocol.field_bounds import Count, Dimension, Text

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Data types that a model computes in."""

FP8 = "float8_e4m3fn"
KV_DTYPE_BYTES = DTYPE_BYTES | {FP8: 1}
"""Data types that keys and values are stored in."""

TOKENS = "tokens"
PAIRS = "pairs"
"""Element orders within one head's part of a block, `[block_size, head_dim]`. TOKENS: token by
token. PAIRS: as a CPU's bf16 pair products read them, in groups of sixteen tokens: keys are
`[head_dim / 2, 16, 2]`, values `[8 pairs of tokens, head_dim, 2]`."""

SPLIT = "split"
"""An order over one layer's whole part of a block: PAIRS, with four exponent bits of each number
stored separately (`engine/native/split.h`). A head's part is not contiguous, so blocks in this
order cannot be sharded."""

ALL_TOKENS, WINDOW = "all", "window"
"""What layers with a window keep in the pool."""

STATE_DTYPE = "float32"
STATE_WINDOW = 2
"""Tokens that a layer with a state sees: the token itself, and the state behind the one before."""

KEYS_AND_VALUES = 2
"""Planes of a layer's part of a block; latents have one."""


_ALIGNMENT = 64  # bytes, of a block in a pool: a cache line

_UNNAMED = {
    "stage": 0,
    "num_stages": 1,
    "num_planes": KEYS_AND_VALUES,
    "grouping": (),
    "peer_stages": 0,
    "stage_ends": (),
    "peer_ends": (),
}
"""A fingerprint leaves these fields out while they have these values. So workers that do not know
the fields compute the same fingerprint."""

MAX_RANKS = 64
"""The most ranks of a stage, and the most stages."""

MAX_LAYERS = 4096
MAX_PAGE_BLOCKS = 64
"""The most blocks of a group in a large page; layers that would need more keep one group."""


class KvGroup(msgspec.Struct, frozen=True):
    """Layers that keep the same tokens: all tokens, or with a `window` only those that later tokens
    still see. A window counts the token itself.

    Layers with `state_numbers` keep a state of that many fp32 numbers each, in `state_parts` equal
    parts that ranks can share out. A token needs the state behind the token before it, so such a
    group has a window of 2: its block i holds the state behind the last computed token of block i,
    and a prefix needs only one block of the group.
    """

    layers: Annotated[tuple[Dimension, ...], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
    window: Dimension | None = None
    state_numbers: Dimension | None = None
    state_parts: Dimension = 1


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one KV block of a rank: `[layers, num_planes, heads, block_size, head_dim]`,
    contiguous, in an order that `protocol.block_order` describes.

    A pool consists of `num_blocks` such blocks, so a block is one contiguous range over all
    `layers` of the rank. `num_layers` and `num_kv_heads` are those of the whole cache. A rank has
    the layers of stage `stage` of `num_stages`, and, of these layers, the heads of rank `tp_rank`
    of `tp_size`. With more ranks than heads, neighbours have copies of one head. If the workers
    that this one exchanges blocks with divide heads in another way, `peer_stages` is the number of
    their stages, else 0. The two planes are keys and values. Latent attention has one plane of one
    head, whose rows serve as both.

    With `grouping`, each group of layers has blocks of its own, of the shape of `of_group`. The
    pool then consists of large pages. A page holds blocks of one group at a time: a whole number of
    blocks of tokens, or one state. The number of blocks in a page is the same on all ranks of all
    workers; they lie `block_stride` bytes apart. Groups without a window come first. `grouping` is
    empty if all layers keep all tokens. The parts of a state are divided among ranks like heads.

    `stage_ends` and `peer_ends` are the numbers of layers before the end of each stage, here and
    at the peers, if layers are not divided as in `stage_layers`. Only the layouts of single groups
    have them, because a group may have no layer in some stages.
    """

    model_fingerprint: Text
    dtype: Text
    num_layers: Dimension
    num_kv_heads: Dimension
    block_size: Dimension
    head_dim: Dimension
    tp_rank: Dimension = 0
    tp_size: Dimension = 1
    stage: Dimension = 0
    num_stages: Dimension = 1
    order: Text = TOKENS
    num_planes: Dimension = KEYS_AND_VALUES
    peer_stages: Dimension = 0
    grouping: Annotated[tuple[KvGroup, ...], msgspec.Meta(max_length=MAX_LAYERS)] = ()
    stage_ends: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    peer_ends: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """The groups; one of all layers if the layout has no `grouping`."""
        return self.grouping or (KvGroup(tuple(range(self.num_layers))),)

    def of_group(self, index: int) -> KvLayout:
        """The layout of one group's blocks, as if the model had only the layers of that group."""
        if not self.grouping:
            return self
        group = self.grouping[index]
        num_layers = len(group.layers)
        stage_ends = _ends(group, self.num_layers, self.num_stages)
        peer_ends = _ends(group, self.num_layers, self.peer_stages)
        if group.state_numbers is not None:
            return KvLayout(
                model_fingerprint=self.model_fingerprint,
                dtype=STATE_DTYPE,
                num_layers=num_layers,
                num_kv_heads=group.state_parts,
                block_size=1,
                head_dim=group.state_numbers // group.state_parts,
                num_planes=1,
                tp_rank=self.tp_rank,
                tp_size=self.tp_size,
                stage=self.stage,
                num_stages=self.num_stages,
                peer_stages=self.peer_stages,
                stage_ends=stage_ends,
                peer_ends=peer_ends,
            )
        return msgspec.structs.replace(
            self, num_layers=num_layers, grouping=(), stage_ends=stage_ends, peer_ends=peer_ends
        )

    @property
    def description(self) -> str:
        """The groups of layers, for people; "" if all layers keep all tokens."""
        return " and ".join(f"{len(each.layers)} layers {_kept(each)}" for each in self.grouping)

    @property
    def page_bytes(self) -> int:
        """Bytes of a large page on this rank: the smallest size in which the blocks of each group
        lie at equal distances. A single rank's page is a whole number of blocks of any group with
        tokens."""
        counts = [self.blocks_per_page(index) for index in range(len(self.groups))]
        sizes = [self.of_group(index).block_bytes for index in range(len(self.groups))]
        row = self.head_dim * KV_DTYPE_BYTES[self.dtype]
        aligned = math.lcm(row, math.gcd(_ALIGNMENT, row * self.block_size))
        unit = math.lcm(*counts) * aligned
        needed = max(count * size for count, size in zip(counts, sizes, strict=True))
        return -(-needed // unit) * unit

    def blocks_per_page(self, index: int) -> int:
        """Number of blocks of a group in a large page."""
        groups, whole = self.groups, self.unsharded
        if groups[index].state_numbers is not None:
            return 1
        sizes = [whole.of_group(each).block_bytes for each in range(len(groups))]
        pairs = list(zip(sizes, groups, strict=True))
        unit = math.lcm(*(size for size, group in pairs if group.state_numbers is None))
        states = [size for size, group in pairs if group.state_numbers is not None]
        return -(-max(states, default=1) // unit) * unit // sizes[index]

    def block_stride(self, index: int) -> int:
        """Bytes from one block of a group to the next in this rank's pool; a block of the group
        begins there and may be smaller."""
        if not self.grouping:
            return self.block_bytes
        return self.page_bytes // self.blocks_per_page(index)

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state."""
        return any(group.state_numbers is not None for group in self.grouping)

    @property
    def layers(self) -> range:
        """The indices of this rank's layers among all of the cache."""
        if self.stage_ends:
            first, end = (0, *self.stage_ends)[self.stage : self.stage + 2]
            return range(first, end)
        return stage_layers(self.num_layers, self.stage, self.num_stages)

    @property
    def heads(self) -> range:
        """The indices of this rank's heads among all KV heads of the cache."""
        first = self.tp_rank * self.num_kv_heads // self.tp_size
        return range(first, first + max(1, self.num_kv_heads // self.tp_size))

    @property
    def num_copies(self) -> int:
        """How many ranks of a stage have each head."""
        return max(1, self.tp_size // self.num_kv_heads)

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`(layers, num_planes, heads, block_size, head_dim)`."""
        return (
            len(self.layers),
            self.num_planes,
            len(self.heads),
            self.block_size,
            self.head_dim,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank, over all planes of its layers with keys and values, of
        all groups."""
        if self.grouping:
            kept = [at for at, group in enumerate(self.grouping) if group.state_numbers is None]
            return sum(self.of_group(index).block_bytes for index in kept)
        return math.prod(self.block_shape) * KV_DTYPE_BYTES[self.dtype]

    @property
    def worker_block_bytes(self) -> int:
        """Bytes of one block of the whole cache, whatever copies ranks have."""
        return self.unsharded.block_bytes

    @property
    def unsharded(self) -> KvLayout:
        """The layout of the whole cache in one pool, layer by layer; the same for all ranks of one
        cache."""
        return msgspec.structs.replace(
            self,
            tp_rank=0,
            tp_size=1,
            stage=0,
            num_stages=1,
            peer_stages=0,
            stage_ends=(),
            peer_ends=(),
        )

    @property
    def is_unsharded(self) -> bool:
        """Whether blocks lie as in `unsharded`: whole on one rank, layer by layer."""
        return self == self.unsharded

    @property
    def rank(self) -> int:
        """This rank's number among all ranks of its worker: stage by stage, from the last one, so
        that rank 0 computes the logits."""
        return (self.num_stages - 1 - self.stage) * self.tp_size + self.tp_rank

    @property
    def ranks(self) -> tuple[KvLayout, ...]:
        """The layouts of all ranks of this rank's worker, by number."""
        return tuple(
            msgspec.structs.replace(self, tp_rank=tp_rank, stage=stage)
            for stage in reversed(range(self.num_stages))
            for tp_rank in range(self.tp_size)
        )

    def shard(self, tp_rank: int, tp_size: int, stage: int = 0, num_stages: int = 1) -> KvLayout:
        """The layout of one rank of this cache. Raises ConfigError."""
        part = msgspec.structs.replace(
            self, tp_rank=tp_rank, tp_size=tp_size, stage=stage, num_stages=num_stages
        )
        part.check_ranks()
        return part

    def check_ranks(self) -> None:
        """Raises ConfigError if the cache has no such rank."""
        heads, size, stages = self.num_kv_heads, self.tp_size, self.num_stages
        divides = 0 < size <= MAX_RANKS and (heads % size == 0 or size % max(1, heads) == 0)
        if not 0 <= self.tp_rank < size or not divides:
            raise ConfigError(
                f"{heads} KV heads have no rank {self.tp_rank} of {size}: the number of ranks must "
                "divide that of the heads, or be a multiple of it"
            )
        if not 0 <= self.stage < stages <= min(self.num_layers, MAX_RANKS):
            raise ConfigError(f"{self.num_layers} layers have no stage {self.stage} of {stages}")
        if self.peer_stages > MAX_RANKS:
            raise ConfigError(f"no worker has {self.peer_stages} stages, only up to {MAX_RANKS}")
        if self.stage_ends or self.peer_ends:
            raise ConfigError("only the layout of a group of layers says where stages end")
        if self.order == SPLIT and (size > 1 or self.peer_stages):
            raise ConfigError("blocks in the order 'split' cannot be shared out by heads")
        for group in self.grouping:
            numbers, parts = group.state_numbers, group.state_parts
            if numbers is not None and (numbers % parts or parts % size):
                raise ConfigError(
                    f"states of {numbers} numbers in {parts} parts cannot be split over {size} "
                    "ranks"
                )

    @property
    def fingerprint(self) -> str:
        """32 hex digits; equal exactly when blocks of one pool can be copied into the other."""
        fields = msgspec.to_builtins(self)
        for group in fields["grouping"]:
            if group["state_numbers"] is None:
                del group["state_numbers"], group["state_parts"]
        named = {name: fields[name] for name in fields if fields[name] != _UNNAMED.get(name)}
        return hashlib.blake2b(msgspec.msgpack.encode(named), digest_size=16).hexdigest()


def _ends(group: KvGroup, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """See `KvLayout.stage_ends`."""
    if num_stages < 2:
        return ()
    stops = [stage_layers(num_layers, stage, num_stages).stop for stage in range(num_stages)]
    return tuple(bisect_left(group.layers, stop) for stop in stops)


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of one stage. Where they cannot be shared out evenly, earlier stages have one
    more: the last one also computes the logits."""
    size, more = divmod(num_layers, num_stages)
    first = stage * size + min(stage, more)
    return range(first, first + size + (stage < more))


def group_layers(windows: Sequence[int | None], context: int) -> tuple[KvGroup, ...]:
    """The `grouping` of layers with these windows, in a model for contexts up to `context`. Empty
    if all keep all tokens, or if a large page would hold too many blocks."""
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kept = None if window is None or window >= context else window
        layers.setdefault(kept, []).append(layer)
    sizes = [len(each) for each in layers.values()]
    if set(layers) == {None} or math.lcm(*sizes) // min(sizes) > MAX_PAGE_BLOCKS:
        return ()
    ordered = sorted(layers, key=lambda window: (window is not None, window or 0))
    return tuple(KvGroup(tuple(layers[window]), window) for window in ordered)


def group_states(
    keep_state: Sequence[bool], state_numbers: int, state_parts: int
) -> tuple[KvGroup, ...]:
    """The `grouping` of a model in which some layers keep a state of `state_numbers` numbers in
    `state_parts` parts."""
    full = tuple(layer for layer, keeps in enumerate(keep_state) if not keeps)
    states = tuple(layer for layer, keeps in enumerate(keep_state) if keeps)
    return KvGroup(full), KvGroup(states, STATE_WINDOW, state_numbers, state_parts)


def kept_grouping(wanted: tuple[KvGroup, ...], kv_windows: str) -> tuple[KvGroup, ...]:
    """Which of a model's groups workers keep. `all`: only groups with states. `auto`: also groups
    with windows, if other layers keep all tokens. `window`: all groups."""
    if any(group.state_numbers is not None for group in wanted):
        return wanted
    keeps_all = any(group.window is None for group in wanted)
    return wanted if kv_windows == WINDOW or (kv_windows == "auto" and keeps_all) else ()


def _kept(group: KvGroup) -> str:
    if group.state_numbers is not None:
        return f"with states of {group.state_numbers} numbers"
    return f"with a window of {group.window} tokens" if group.window else "without a window"


def kept_from(num_tokens: int, block_size: int, window: int | None) -> int:
    """The first block that a group still keeps when `num_tokens` tokens are computed. A sequence
    may continue from the last two block boundaries, so the group keeps the tokens that a token at
    either boundary sees."""
    if window is None:
        return 0
    boundary = max(0, num_tokens // block_size - 1)
    return first_covering(boundary, block_size, window)


def first_covering(boundary: int, block_size: int, window: int) -> int:
    """The first block that the token behind `boundary` blocks sees in its window."""
    return max(0, boundary * block_size - (window - 1)) // block_size
