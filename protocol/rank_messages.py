"""Messages between the head of a worker whose ranks span several hosts, and its other nodes.

A node is a host's part of the worker: the process there that starts the ranks of its host, passes
on what they and the head tell each other, and moves their KV blocks.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from protocol.field_bounds import Blob, Count, Dimension, Reason, Text
from protocol.message_base import Message

Terms = Annotated[dict[Text, Text], Meta(max_length=256)]
"""What has to be equal on all nodes of a worker, by name."""


class NodeHello(Message, frozen=True, kw_only=True):
    """A node to the head: these are my number, my address and my terms."""

    node: Dimension
    address: Text
    terms: Terms


class NodeAccepted(Message, frozen=True, kw_only=True):
    """The head to a node: start your ranks."""


class NodeRefused(Message, frozen=True, kw_only=True):
    """The head to a node: you cannot be part of this worker."""

    reason: Reason


class RankBytes(Message, frozen=True, kw_only=True):
    """The next bytes of the link between the head and a rank, in either direction."""

    rank: Dimension
    data: Blob


class EndBytes(Message, frozen=True, kw_only=True):
    """An order to an end of KV transfers on a node, or its report to the head, as the transports
    encode it."""

    data: Blob


class NodeBeat(Message, frozen=True, kw_only=True):
    """A node to the head, again and again: I am there. `times` are those of its ranks so far, as
    `RankTimes` has them. Until when a write may be posted counts from the beat with a nonce."""

    nonce: Count
    times: Annotated[list[Count], Meta(max_length=4096)]


class HeadBeat(Message, frozen=True, kw_only=True):
    """The head to a node, again and again: I am there."""


class NodeLeaves(Message, frozen=True, kw_only=True):
    """A node to the head: I was told to stop, so let the worker finish its requests and end."""


class NodeEnds(Message, frozen=True, kw_only=True):
    """A node to the head: the worker cannot go on, for this reason."""

    reason: Reason


class WorkerEnds(Message, frozen=True, kw_only=True):
    """The head to a node: end your ranks and yourself; with a reason if that is a failure."""

    reason: Reason = ""


ToHead = NodeHello | RankBytes | EndBytes | NodeBeat | NodeLeaves | NodeEnds
ToNode = NodeAccepted | NodeRefused | RankBytes | EndBytes | HeadBeat | WorkerEnds
