"""Loads a worker's engine from its checkpoint or from another worker's weights, and warms it up."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint.model_source import HUB_PATTERNS, TEXT_PATTERNS, model_name, resolve_model
from engine.checkpoint.config import load_model_config
from engine.checkpoint.shard import Shard
from engine.checkpoint.stored_tensors import OpenTensors
from engine.cpu_quota import threads_within_quota
from engine.device import pick_device
from engine.engine_config import EngineConfig
from engine.loader import LoadedEngine, load_engine
from engine.parallel.sums import RankLost
from engine.sampling.grammar_matcher import GrammarLimits
from kv_transfer.service import TransferService
from kv_transfer.transports.distant_end import DistantHost
from kv_transfer.transports.registry import create_transport
from process.cores import cores_in, usable_cores
from process.store.store_url import store_url
from protocol.messages import Role
from scheduling.scheduler import SchedulerConfig
from worker.engine_settings import PEER
from worker.ranks.head import Hands
from worker.ranks.other_nodes import OtherNodes
from worker.ranks.processes import HandSettings
from worker.settings import WorkerSettings, choose_worker_id
from worker.startup.card_plan import TorchCards, devices_of_ranks
from worker.startup.nodes import lost_node, open_nodes, own_address, terms_of
from worker.startup.start_phases import StartPhases
from worker.startup.step_limits import card_bytes, step_limits
from worker.weights.choice import Wanted, try_load_from_peer
from worker.weights.peer_tensors import Asker
from worker.weights.server import TransferMeans

log = logging.getLogger(__name__)

LOST_AFTER_SILENCES = 3
"""A rank that a step waits for counts as lost after this many times `peer_silence_s`: peers have
given the worker up by then."""


def fetched(settings: WorkerSettings) -> Path:
    """The model's folder, without its weights if a peer is to send them. Raises ModelLoadError and
    ConfigError."""
    patterns = TEXT_PATTERNS if settings.weights_from == PEER else HUB_PATTERNS
    return resolve_model(settings.model, settings.revision, patterns=patterns)


def served_name(settings: WorkerSettings) -> str:
    """The model's name in answers."""
    return next(iter(settings.served_model_name), model_name(settings.model))


class ModelLoading:
    """Loads the model once. `folder` has the model's files."""

    def __init__(
        self,
        settings: WorkerSettings,
        role: Role,
        folder: Path,
        transfers: TransferService,
        phases: StartPhases,
    ) -> None:
        self.folder = folder
        self._settings = settings
        self._role = role
        self._transfers = transfers
        self._phases = phases
        self._hands: Hands | None = None
        self._nodes: OtherNodes | None = None

    @property
    def other_hosts(self) -> Sequence[DistantHost]:
        """Those who have parts of the pool that this process does not reach, once the model is
        loaded."""
        return () if self._hands is None else self._hands.hosts

    def load(self, stack: ExitStack) -> LoadedEngine:
        """The engine, ready to run. Raises ModelLoadError, ConfigError, RankLost and Stopped."""
        try:
            return self._load_and_warm_up(stack)
        except RankLost as error:
            explained = error if self._hands is None else self._hands.explained(error)
            raise lost_node(self._nodes, explained) from error

    def _load_and_warm_up(self, stack: ExitStack) -> LoadedEngine:
        settings, started = self._settings, time.monotonic()
        threads = settings.torch_threads or len(cores_in(settings.cores))
        if settings.num_ranks > 1:
            wanted = threads or threads_within_quota(len(usable_cores()))
            threads = self._start_hands(stack, wanted)
        torch.set_num_threads(threads or threads_within_quota(torch.get_num_threads()))
        loaded = None
        if settings.weights_from == PEER:
            loaded = self._try_load_from_peer(stack)
            if loaded is None:
                self._phases.enter("fetch")
                self.folder = resolve_model(settings.model, settings.revision)
        if loaded is None:
            loaded = self._load(None)
        name, layout = served_name(settings), loaded.engine.layout
        log.info("loaded %s in %.1f s, warming up", name, time.monotonic() - started)
        log.info(
            "KV blocks of %d tokens, %s, in the order of %s: layout fingerprint %s",
            layout.block_size,
            layout.dtype,
            layout.order,
            layout.unsharded.fingerprint,
        )
        self._phases.enter("warm_up")
        loaded.engine.warm_up()
        return loaded

    def _try_load_from_peer(self, stack: ExitStack) -> LoadedEngine | None:
        settings = self._settings
        own_id = choose_worker_id(self._role.value, settings.worker_id)
        return try_load_from_peer(
            Wanted(store_url(settings), settings.cluster, served_name(settings), self.folder),
            Asker(own_id, self._role, settings.cluster_secret),
            transfer_means(settings, self._transfers),
            self._load,
            stack,
        )

    def _load(self, open_tensors: OpenTensors | None) -> LoadedEngine:
        phases = self._phases
        config = replace(engine_config(self._settings, self.folder), open_tensors=open_tensors)
        progress = phases.weights(served_name(self._settings))
        ranks = None if self._hands is None else self._hands.ranks
        return load_engine(
            config, time.monotonic, self._allocate, progress, ranks, enter=phases.enter
        )

    def _start_hands(self, stack: ExitStack, num_threads: int) -> int:
        """Start the worker's other ranks; returns the CPU threads of each. Raises ConfigError."""
        settings = self._settings
        devices = devices_of_ranks(settings, self.folder, TorchCards())
        config = engine_config(settings, self.folder)
        own = Shard.numbered(0, settings.tensor_parallel, settings.pipeline_parallel)
        load_model_config(self.folder).part_of(own)  # fails in one line, not once per rank
        if settings.num_nodes > 1:
            self._phases.enter("nodes")
            terms = terms_of(settings, config, self.folder, self._role)
            self._nodes = open_nodes(settings, terms, self._phases.stop, stack)
        hands = hand_settings(settings, config, num_threads, self._role)
        hands = replace(hands, devices=devices, transport=self._transfers.transport_name)
        self._hands = Hands(hands, end_process, silence_s(settings), nodes=self._nodes)
        stack.callback(self._hands.close)
        return hands.threads

    def _allocate(self, num_bytes: int) -> memoryview | None:
        if self._hands is not None:
            return self._hands.allocate(num_bytes, self._transfers.allocate)
        memory = self._transfers.allocate(num_bytes)
        return None if memory is None else memoryview(memory.view)


def hand_settings(
    settings: WorkerSettings, config: EngineConfig, num_threads: int, role: Role
) -> HandSettings:
    """What the hands of one host need, who share out its CPU threads. Raises ConfigError."""
    num_local = settings.num_ranks // settings.num_nodes
    return HandSettings(
        config,
        settings.tensor_parallel,
        max(1, num_threads // num_local),
        settings.log_level,
        settings.log_format,
        settings.worker_id or role.value,
        settings.pipeline_parallel,
        num_hosts=settings.num_nodes,
        address=own_address(settings) if settings.num_nodes > 1 else "",
    )


def silence_s(settings: WorkerSettings) -> float:
    """How long a step waits for a rank."""
    return LOST_AFTER_SILENCES * settings.peer_silence_s


def end_process(reason: str) -> None:
    """End this process at once, as a crash would: a rank of its model is gone."""
    log.error("the worker ends: %s", reason)
    logging.shutdown()
    os._exit(1)


def transfer_means(settings: WorkerSettings, transfers: TransferService) -> TransferMeans:
    """The transport for weights between this worker and others, the same as for KV blocks."""
    name = transfers.transport_name
    return TransferMeans(
        settings.cluster_secret.encode(),
        name,
        lambda: create_transport(name, "cpu"),
        settings.peer_silence_s,
    )


def engine_config(settings: WorkerSettings, folder: Path) -> EngineConfig:
    """The engine's configuration for the checkpoint in `folder`."""
    limits = step_limits(settings, card_bytes(pick_device(settings.device)))
    return EngineConfig(
        folder=folder,
        scheduler=SchedulerConfig(
            block_size=settings.block_size,
            max_batch_size=limits.max_batch_size,
            chunk_min_tokens=limits.chunk_min_tokens,
            chunk_max_tokens=limits.chunk_max_tokens,
            itl_target_s=settings.itl_target_ms / 1e3,
            prompt_max_tokens=limits.prompt_max_tokens,
            even_steps=settings.pipeline_parallel > 1,
        ),
        dtype=settings.dtype,
        device=settings.device,
        num_blocks=settings.num_blocks,
        memory_fraction=settings.memory_fraction,
        max_context=settings.max_context,
        attention=settings.attention,
        weights=settings.weights,
        activations=settings.activations,
        kv_dtype=settings.kv_dtype,
        kv_order=settings.kv_order,
        kv_windows=settings.kv_windows,
        peer_tensor_parallel=settings.peer_tensor_parallel,
        peer_pipeline_parallel=settings.peer_pipeline_parallel,
        kernels_dir=None if settings.kernels_dir is None else Path(settings.kernels_dir),
        cuda_graphs=settings.cuda_graphs,
        card_sums=settings.card_sums,
        batch_invariant=settings.batch_invariant,
        grammars=GrammarLimits(settings.mask_wait_ms / 1e3, settings.mask_limit_s),
    )
