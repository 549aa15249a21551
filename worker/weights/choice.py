"""The choice of a starting worker's weights: another worker's if available, otherwise its
checkpoint's.

Nothing here keeps a worker from starting: any trouble with other workers is logged in one line, and
the checkpoint is loaded.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from checkpoint.gguf.folder import SUFFIX
from checkpoint.texts_fingerprint import texts_fingerprint
from engine.checkpoint.config import load_model_config
from engine.checkpoint.files import model_fingerprint, weight_files
from engine.checkpoint.stored_tensors import OpenTensors
from engine.checkpoint.weights import has_blocks
from process.process_watch import machine_name
from process.store.fleet_watcher import read_fleet
from protocol.errors import ConfigError, ModelLoadError, ServiceError, TransferError
from protocol.messages import PROTOCOL_VERSION, Role
from protocol.registration import WorkerInfo, WorkerState
from worker.weights.peer_tensors import Asker, PeerTensors
from worker.weights.server import TransferMeans

log = logging.getLogger(__name__)

_MOST_ASKED = 3
FINGERPRINT_DIGITS = 32
"""Separates a worker's model fingerprint from the form of its weights."""
T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """The wanted weights: those of `model`, whose configuration and tokenizer are in `folder`. The
    weights may be there, too."""

    redis_url: str
    cluster: str
    model: str
    folder: Path


def try_load_from_peer(
    wanted: Wanted,
    asker: Asker,
    means: TransferMeans,
    load: Callable[[OpenTensors], T],
    stack: ExitStack,
) -> T | None:
    """The result of `load` for another worker's tensors. None if no worker has them, with the
    reason in the log. Raises what `load` raises once it has all tensors."""
    try:
        peers = peers_with(wanted, asker.name, means.transport)
    except (ConfigError, ServiceError, TransferError, ModelLoadError) as error:
        log.warning("the weights come from the checkpoint, not from a peer: %s", error)
        return None
    reasons = []
    for info in peers[:_MOST_ASKED]:
        tensors = PeerTensors(info, asker, means)
        stack.callback(tensors.release)
        try:
            loaded = load(tensors.open)
        except (TransferError, ModelLoadError) as error:
            if tensors.is_finished:
                raise
            reasons.append(f"{info.worker_id}: {error}")
        else:
            size, took_s = tensors.num_bytes / 1e6, tensors.took_s
            log.info("weights from peer %s, %.0f MB in %.1f s", info.worker_id, size, took_s)
            return loaded
        finally:
            tensors.hang_up()
    reason = "; ".join(reasons)
    log.warning("the weights come from the checkpoint, not from a peer: %s", reason)
    return None


def peers_with(wanted: Wanted, own_id: str, transport: str) -> list[WorkerInfo]:
    """The workers that can send the weights: those on this machine come first, and among equals
    prefill workers. Raises TransferError, with the reason, if there are none; and errors of the
    store and the folder."""
    fleet = read_fleet(wanted.redis_url, wanted.cluster)
    others = [info for info in fleet.values() if info.worker_id != own_id]
    texts, fingerprint = texts_fingerprint(wanted.folder), own_fingerprint(wanted.folder)
    found, reasons = [], []
    for info in others:
        if reason := _why_not(info, wanted.model, texts, fingerprint, transport):
            reasons.append(f"{info.worker_id} {reason}")
        else:
            found.append(info)
    if not found:
        raise TransferError("; ".join(reasons[:_MOST_ASKED]) or "no other worker is registered")
    here = machine_name()
    return sorted(
        found, key=lambda info: (info.machine != here, info.role is Role.DECODE, random.random())
    )


def _why_not(info: WorkerInfo, model: str, texts: str, fingerprint: str, transport: str) -> str:
    theirs = info.model_fingerprint[:FINGERPRINT_DIGITS]
    if info.state is not WorkerState.READY:
        return f"is {info.state.value}"
    if info.protocol_version != PROTOCOL_VERSION:
        return f"speaks version {info.protocol_version} of the protocol, not {PROTOCOL_VERSION}"
    if info.model != model:
        return f"serves {info.model}, not {model}"
    if info.texts_fingerprint != texts:
        return "has another configuration or tokenizer"
    if fingerprint and theirs != fingerprint:
        return "has other weights than our checkpoint"
    if not info.sends_weights:
        return "has no files of weights to send (quantized ones are not sent)"
    if info.transport != transport:
        return f"moves bytes by {info.transport}, not by {transport}"
    return ""


def own_fingerprint(folder: Path) -> str:
    """The fingerprint of the checkpoint; "" if its weights are missing or unreadable."""
    try:
        return model_fingerprint(folder)
    except ModelLoadError:
        return ""


def can_send(folder: Path) -> bool:
    """Whether `folder` has weights that may be sent to others: files in a format other than
    GGUF, whose weights are not quantized."""
    try:
        is_quantized = has_blocks(folder, load_model_config(folder))
        return not is_quantized and all(file.suffix != SUFFIX for file in weight_files(folder))
    except ModelLoadError:
        return False
