"""Messages about weights that a starting worker gets from one that serves."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.field_bounds import Count, Reason, Text
from protocol.handoff_messages import PeerDescriptor
from protocol.message_base import Message


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of a checkpoint as its files store it; `dtype` as in safetensors."""

    name: Text
    dtype: Text
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    num_bytes: Count


class WeightsAsk(Message, frozen=True, kw_only=True):
    """A starting worker to one that serves: send me your checkpoint's tensors into `pool`.

    `ask` is a random name, which all further messages about this transfer carry. `block_bytes` is
    the size of the pool's blocks.
    """

    ask: Text
    pool: PeerDescriptor
    block_bytes: Count


class WeightsOffer(Message, frozen=True, kw_only=True):
    """The answer: the tensors will come in this order, each followed by the SHA-256 of its bytes.

    They form one stream, cut into pieces of a block's size. Piece i goes into block i modulo the
    number of blocks, and its notification is i in eight bytes, the lowest first. `fingerprint`
    identifies the checkpoint.
    """

    ask: Text
    fingerprint: Text
    tensors: Annotated[list[StoredTensor], Meta(max_length=1 << 18)]


class WeightsGrant(Message, frozen=True, kw_only=True):
    """The sender may write the first `num_pieces` pieces; earlier pieces have been read."""

    ask: Text
    num_pieces: Count


class WeightsRefused(Message, frozen=True, kw_only=True):
    """The sender writes no more pieces, for the given reason."""

    ask: Text
    reason: Reason


class WeightsClose(Message, frozen=True, kw_only=True):
    """The asker has everything it wants, or goes elsewhere."""

    ask: Text


WeightsMessage = WeightsAsk | WeightsGrant | WeightsClose
"""The asker's messages."""
