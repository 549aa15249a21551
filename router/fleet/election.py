"""The model that a router serves, chosen from those that registered workers serve. Pure.

The router's own checkpoint decides. If no worker reports its configuration and tokenizer, the name
that an operator gave decides, and without a name, the model of most workers. So a stray worker
cannot change the model, even if it registers first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.errors import IncompatiblePeer
from protocol.messages import PROTOCOL_VERSION
from protocol.registration import WorkerInfo, WorkerState
from router.fleet.conditions import Cause, Condition, State


@dataclass(frozen=True)
class WantedModel:
    """The router's own model: its name (`is_named` if an operator gave it), and the fingerprint of
    its configuration and tokenizer, "" if there is none."""

    name: str
    texts_fingerprint: str = ""
    is_named: bool = False

    def refusal_of(self, info: WorkerInfo) -> Condition | None:
        """Why this router cannot serve a worker's checkpoint; None if it can."""
        theirs = info.texts_fingerprint
        if not theirs or not self.texts_fingerprint or theirs == self.texts_fingerprint:
            return None
        return _refused(
            Cause.MODEL,
            f"it serves {info.model!r}, and its configuration or tokenizer is not that of this "
            f"router's {self.name!r}",
        )


@dataclass(frozen=True)
class FleetIdentity:
    """The properties that all workers of the fleet share."""

    model: str
    model_fingerprint: str
    layout_fingerprint: str
    block_size: int

    def refusal_of(self, info: WorkerInfo) -> Condition | None:
        """Why a worker cannot be used in this fleet; None if it can."""
        if info.protocol_version != PROTOCOL_VERSION:
            ours, theirs = str(PROTOCOL_VERSION), str(info.protocol_version)
            text = str(IncompatiblePeer("protocol version", ours, theirs))
            return _refused(Cause.PROTOCOL, text)
        if info.model_fingerprint != self.model_fingerprint:
            if info.model == self.model:
                text = f"it serves another version of {info.model!r} than this fleet"
                return _refused(Cause.MODEL, text)
            return _refused(Cause.MODEL, f"it serves {info.model!r}, and this fleet {self.model!r}")
        if info.layout_fingerprint != self.layout_fingerprint:
            ours, theirs = self.layout_fingerprint, info.layout_fingerprint
            text = str(IncompatiblePeer("KV layout fingerprint", ours, theirs))
            return _refused(Cause.LAYOUT, text)
        return None


def _refused(cause: Cause, reason: str) -> Condition:
    return Condition(State.REFUSED, cause, reason)


def elect(wanted: WantedModel, members: Iterable[WorkerInfo]) -> FleetIdentity | None:
    """The model that the fleet serves; None while no ready worker serves one that this router can
    serve."""
    usable = [
        each
        for each in members
        if each.state is not WorkerState.LOADING
        and each.protocol_version == PROTOCOL_VERSION
        and wanted.refusal_of(each) is None
    ]
    votes: dict[FleetIdentity, list[WorkerInfo]] = {}
    for each in usable:
        identity = FleetIdentity(
            each.model, each.model_fingerprint, each.layout_fingerprint, each.block_size
        )
        votes.setdefault(identity, []).append(each)
    ready = [
        identity
        for identity, voters in votes.items()
        if any(each.state is WorkerState.READY for each in voters)
    ]

    def rank(identity: FleetIdentity) -> tuple[bool, bool, int, str]:
        voters = votes[identity]
        is_ours = any(each.texts_fingerprint for each in voters) and wanted.texts_fingerprint != ""
        is_asked_for = wanted.is_named and identity.model == wanted.name
        return is_ours, is_asked_for, len(voters), identity.model_fingerprint

    return max(ready, key=rank, default=None)
