"""A checkpoint's weights in blocks of 4 and 5 bits, rounded for the inputs that a text gives them.

Layer after layer is loaded in bf16 and read by windows of the text; what it computes is the input
of the next one. Memory holds one layer, and what its products and the next layer get as inputs.
"""

from __future__ import annotations

import ctypes
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from checkpoint.gguf.folder import SUFFIX
from checkpoint.json_keys import read_json_object
from checkpoint.model_source import TEXT_PATTERNS
from engine.attention.base import Segment
from engine.checkpoint.config import load_model_config
from engine.checkpoint.files import place_of, weight_files
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_weights import LM_HEAD, Weights, halves, places_in, plain
from engine.checkpoint.shard import Shard
from engine.checkpoint.stored_tensors import FileTensors
from engine.checkpoint.weights import has_blocks, load_weights
from engine.cpu.rounded_rows import can_round
from engine.kv_pool import KvPool
from engine.models.decoder import DecoderModel
from engine.rounding.checkpoint_file import WrittenTensor, write_index, write_tensors
from engine.rounding.compensation import moments_of, rounded_for
from engine.rounding.recording import RecordingBackend, RecordingLinear
from protocol.errors import ModelLoadError
from scheduling.pool_sizes import blocks_with
from scheduling.states.step import StateStep

WINDOW = 512
"""Tokens that the model reads together."""
_BLOCK_SIZE = 16
_FILE = "model-{:05}-of-{:05}.safetensors"
_SMALL_FILES = (*TEXT_PATTERNS, "LICENSE*")

Report = Callable[[int, int], None]
"""Called after each layer, with its number from 1 on and the number of layers."""


@torch.inference_mode()
def write_quantized(
    source: Path,
    windows: Sequence[Sequence[int]],
    target: Path,
    kernels: ctypes.CDLL,
    report: Report = lambda layer, layers: None,
) -> None:
    """Write the checkpoint in the folder `source` to the empty folder `target`, rounded for a text
    whose tokens are in `windows` of up to WINDOW. Raises ModelLoadError, and OSError if `target`
    cannot be written to."""
    config = plain_config(source)
    read = [torch.tensor(window) for window in windows]
    states: list[torch.Tensor] = []
    files: dict[str, str] = {}
    for stage in range(config.num_layers):
        layer = RecordedLayer(source, config, stage, kernels)
        states = layer.read(read, states)
        tensors = layer.rounded()
        del layer  # before the next one is loaded
        name = _FILE.format(stage + 1, config.num_layers)
        write_tensors(target / name, tensors)
        files |= dict.fromkeys(tensors, name)
        report(stage + 1, config.num_layers)
    write_index(target, files)
    keys = read_json_object(source / "config.json")
    keys |= {"tie_word_embeddings": False, "dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(keys, indent=2))
    _copy_small_files(source, target)


def plain_config(folder: Path) -> ModelConfig:
    """The configuration of a checkpoint that can be rounded. Raises ModelLoadError for others."""
    config = load_model_config(folder)
    if weight_files(folder)[0].suffix == SUFFIX:
        raise ModelLoadError(f"{place_of(folder)}: name a checkpoint in safetensors, not in GGUF")
    if has_blocks(folder, config):
        raise ModelLoadError(f"{folder}: the weights are quantized already")
    if config.experts is not None and config.experts.are_paired:
        raise ModelLoadError(f"{folder}: experts of {config.architecture} are not rounded")
    return config


class RecordedLayer:
    """One layer of a model; the first also has the embedding, and the last the logits. Raises
    ModelLoadError."""

    def __init__(self, folder: Path, whole: ModelConfig, stage: int, kernels: ctypes.CDLL) -> None:
        shard = Shard(0, 1, stage, whole.num_layers)
        weights = load_weights(folder, whole, dtype=torch.bfloat16, shard=shard)
        self._config = part = whole.part_of(shard)
        self._kernels, self._stored = kernels, FileTensors(folder)
        self._stored_names = places_in(part, weights).keys()
        self._rows = _rows_of_matrices(part, weights)
        self._backend = RecordingBackend(part, kernels)
        self._model = DecoderModel(part, weights, self._backend)
        layout = part.kv_layout("", _BLOCK_SIZE, self._backend.dtype)
        if part.state_numbers is not None:  # groups of layers are those of the whole model
            layout = whole.kv_layout("", _BLOCK_SIZE, self._backend.dtype)
            layout = layout.shard(0, 1, stage, whole.num_layers)
        num_blocks = blocks_with(layout, WINDOW // _BLOCK_SIZE)
        self._attention = self._backend.attention(KvPool(layout, num_blocks))

    def read(
        self, windows: Sequence[torch.Tensor], states: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The hidden states [N, hidden] behind this layer, from those before it, by window."""
        found = []
        for number, window in enumerate(windows):
            if states:
                self._backend.given.states = states[number]
            size, blocks = len(window), range(WINDOW // _BLOCK_SIZE)
            step = StateStep(0, None, ((size, 0),))
            self._attention.plan([Segment(size, size, blocks, states=step)])
            x = self._model.hidden(window, torch.arange(size), self._attention)
            if self._config.gives_logits:
                self._model.logits(x)
            found.append(x)
        return found

    def rounded(self) -> dict[str, WrittenTensor]:
        """The layer's tensors by name, rounded where that is possible. Raises ModelLoadError if an
        input was not finite."""
        found: dict[str, WrittenTensor] = {}
        for layer in self._backend.layers:
            if can_round(layer.weight):
                found.update(self._rounded(layer, self._rows[layer.weight.data_ptr()]))
        for name in self._stored_names - found.keys():
            entry = self._stored.entries[name]
            found[name] = WrittenTensor(entry.dtype, entry.shape, self._stored.read(name))
        return found

    def _rounded(
        self, layer: RecordingLinear, parts: Sequence[tuple[str, int]]
    ) -> Iterator[tuple[str, WrittenTensor]]:
        moments = moments_of(layer.inputs, layer.weight.shape[1])
        if not bool(moments.isfinite().all() and layer.weight.isfinite().all()):
            raise ModelLoadError(
                f"{self._stored.where}: {parts[0][0]!r}, or what it is multiplied by, is not finite"
            )
        blocks = rounded_for(layer.weight, moments, layer.bits, self._kernels)
        begin = 0
        for name, count in parts:
            rows = blocks.rows[begin : begin + count]
            yield name, WrittenTensor(blocks.kind, (count, blocks.inputs), rows)
            begin += count


def _rows_of_matrices(config: ModelConfig, weights: Weights) -> dict[int, list[tuple[str, int]]]:
    """By a matrix's address, the names of its tensors and how many rows are theirs."""
    found = {
        plain(half.matrices[each.name]).data_ptr(): [
            (f"{name}.{rows.name}", rows.count) for rows in each.rows
        ]
        for name, tensors, half in halves(config, weights)
        for each in tensors
        if each.name in half.matrices
    }
    head = plain(weights.lm_head)
    return found | {head.data_ptr(): [(LM_HEAD, len(head))]}


def _copy_small_files(source: Path, target: Path) -> None:
    """Copy the files beside the weights, but those that `target` has of its own."""
    for pattern in _SMALL_FILES:
        for file in source.glob(pattern):
            if not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)
