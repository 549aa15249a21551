"""Accuracy lost with fewer bits: perplexity, and how far next-token probabilities move.

    python -m bench.accuracy --model FOLDER|FILE.gguf [--weights auto,int8,int4] [--text FILE]
        [--tokens N] [--peers llama.cpp] [--peer-python llama.cpp=PYTHON]
    python -m bench.accuracy --model FILE.gguf --formats Q8_0,Q4_0  # also with such weights
    python -m bench.accuracy --model FOLDER --weights auto,fp8      # on a card
    python -m bench.accuracy --model FOLDER --kv-dtype auto,fp8     # of keys and values, on a CPU
    python -m bench.accuracy --model FILE.gguf --activations auto,int8  # of inputs, on a CPU
    python -m bench.accuracy --model FOLDER --quantized FOLDER      # as `baton quantize` writes it

Reads a text in windows, predicting each token from those before it in its window, and compares
every combination of weights, KV and activations with the first one. With fp8 weights all
combinations run on a card, which has no int8 and int4. Without `--text` the text is the docstrings
of Python's own modules, which the bundled model has not seen. The figures depend on model and text:
measure yours.
`--peers llama.cpp` adds the perplexity of llama.cpp, which gets the same tokens in the same windows
and reads the same GGUF file. `--formats` also measures files with the model's weights in these
formats, which are made from the values in the given file.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from bench.engine.limits import bits_per_weight, step_needs
from bench.engine.peer_process import PeerProcess, installed_peers, interpreters
from bench.engine.workloads import EngineNeeds
from bench.tools.gguf_formats import FORMATS, folder_in_format
from bench.tools.paths import DEMO_MODEL
from checkpoint.model_source import resolve_model
from engine.attention.base import Segment
from engine.backend import Backend
from engine.checkpoint.config import load_model_config
from engine.checkpoint.weights import has_blocks, load_block_weights, load_weights
from engine.cpu.backend import CpuBackend
from engine.cpu.native_linear import packed_bits
from engine.gpu.backend import CardBackend
from engine.kv_pool import KvPool
from engine.models.decoder import DecoderModel
from engine.native.library import KernelsUnavailable, load_library
from protocol.errors import BatonError
from protocol.layout import FP8

WINDOW = 512
BLOCK_SIZE = 16
BITS = {"auto": 12, "exact16": 16, "exact12": 12, "int8": 8, "int4": 4, "fp8": 8}
KV_DTYPES = {"auto": "bfloat16", "fp8": FP8}
ACTIVATIONS = ("auto", "int8")
MODULES = (
    "argparse",
    "asyncio",
    "collections",
    "configparser",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "doctest",
    "email",
    "fractions",
    "functools",
    "heapq",
    "inspect",
    "json",
    "logging",
    "optparse",
    "pickle",
    "random",
    "re",
    "statistics",
    "string",
    "tarfile",
    "textwrap",
    "threading",
    "tokenize",
    "turtle",
    "unittest",
    "urllib.request",
)


@dataclass
class Sums:
    """Sums over all tokens: negative log-likelihood, divergence from the first kind, tokens with
    the same best prediction (not known of a peer); and the bits of a weight, where known."""

    bits_per_weight: float | None = None
    tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0


@dataclass(frozen=True)
class Kind:
    """A kind of weights, of KV and of activations, named as in the workers' settings."""

    weights: str = "auto"
    kv_dtype: str = "auto"
    activations: str = "auto"
    format: str = ""  # format of a file that was made for this kind, or a quantized folder

    @property
    def label(self) -> str:
        """The name in the table."""
        parts = [self.format or self.weights]
        parts += [] if self.kv_dtype == "auto" else [f"KV {self.kv_dtype}"]
        parts += [] if self.activations == "auto" else [f"activations {self.activations}"]
        return ", ".join(parts)


class Reader:
    """One checkpoint of one kind on one device, reading windows of a text."""

    def __init__(self, folder: Path, kind: Kind, device: torch.device) -> None:
        """Raises ModelLoadError, and BatonError if the kernels are unavailable on this CPU, or do
        not multiply integers of 8 bits."""
        config, bits = load_model_config(folder), BITS[kind.weights]
        is_auto = kind.weights == "auto" and device.type == "cpu"
        keeps_blocks = is_auto and has_blocks(folder, config)
        weights = (
            load_block_weights(folder, config, torch.bfloat16)
            if keeps_blocks
            else load_weights(folder, config, device, torch.bfloat16, None)
        )
        layout = config.kv_layout("accuracy", BLOCK_SIZE, KV_DTYPES[kind.kv_dtype])
        backend: Backend
        if device.type == "cpu":
            kernels, int8_inputs = _kernels(), kind.activations == "int8"
            if int8_inputs and not kernels.baton_has_int8():
                raise BatonError("this CPU's kernels have no activations in int8")
            backend = CpuBackend(
                config, "bfloat16", kernels, weight_bits=bits, int8_inputs=int8_inputs
            )
        else:
            backend = CardBackend(config, device, torch.bfloat16, weight_bits=bits)
        layout = msgspec.structs.replace(layout, order=backend.orders(layout)[0])
        self._device = device
        pool = KvPool(layout, WINDOW // BLOCK_SIZE, device, None)
        self._model = DecoderModel(config, weights, backend)
        self._attention = backend.attention(pool)

    @property
    def bits_per_weight(self) -> float | None:
        """The average bits of a weight as products read it, including scales; None if unknown."""
        return packed_bits(self._model.linear_layers())

    def logits(self, window: torch.Tensor) -> torch.Tensor:
        """[tokens, vocab], fp32, on the CPU."""
        blocks = list(range(WINDOW // BLOCK_SIZE))
        self._attention.plan([Segment(len(window), len(window), blocks)])
        positions = torch.arange(len(window), device=self._device)
        return self._model.forward(window.to(self._device), positions, self._attention).cpu()


def pick_device(kinds: list[Kind]) -> torch.device:
    """A device that can run all these kinds. Raises BatonError."""
    weights = {kind.weights for kind in kinds}
    if "fp8" not in weights:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BatonError("weights fp8 needs a CUDA card, and torch sees none")
    if any(kind.kv_dtype == "fp8" for kind in kinds):
        raise BatonError("KV in fp8 is measured on a CPU, where there are no weights in fp8")
    if any(kind.activations == "int8" for kind in kinds):
        raise BatonError("activations in int8 are for a CPU, where there are no weights in fp8")
    if not weights <= {"auto", "fp8"}:
        raise BatonError("a card has no weights but auto and fp8: measure int8 and int4 apart")
    return torch.device("cuda:0")


def _kernels() -> ctypes.CDLL:
    try:
        return load_library()
    except KernelsUnavailable as error:
        raise BatonError(str(error)) from error


def held_text() -> str:
    """Docstrings of modules and of their classes and functions, in a fixed order."""
    texts = []
    for name in MODULES:
        module = importlib.import_module(name)
        members = [getattr(module, member) for member in sorted(vars(module))]
        own = [m for m in members if getattr(m, "__module__", None) == name]
        texts += [m.__doc__ for m in (module, *own) if isinstance(m.__doc__, str)]
    return "\n\n".join(texts)


def compare(
    folder: Path,
    kinds: list[Kind],
    text: str,
    num_tokens: int,
    made: Mapping[str, Path] | None = None,
) -> dict[Kind, Sums]:
    """The sums of each kind over the text's first `num_tokens` tokens. `made` are the folders of
    kinds with a format of their own."""
    device, folders = pick_device(kinds), {"": folder, **(made or {})}
    readers = {kind: Reader(folders[kind.format], kind, device) for kind in kinds}
    sums = {kind: Sums(reader.bits_per_weight) for kind, reader in readers.items()}
    for window in map(torch.tensor, windows_of(folder, text, num_tokens)):
        expected: torch.Tensor | None = None
        for kind, reader in readers.items():
            odds = reader.logits(window)[:-1].log_softmax(-1)
            expected = odds if expected is None else expected
            _add(sums[kind], odds, expected, window[1:])
    return sums


def windows_of(folder: Path, text: str, num_tokens: int) -> list[list[int]]:
    """The text's first `num_tokens` tokens, by the model's tokenizer, in windows of at least two
    tokens."""
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:num_tokens]
    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens), WINDOW)]
    return [window for window in windows if len(window) > 1]


def read_by_peers(
    folder: Path, pythons: Mapping[str, str], windows: Sequence[list[int]]
) -> dict[str, Sums]:
    """The sums of each peer over the same windows, by its version; `pythons`: the interpreters.
    Raises BatonError."""
    needs = EngineNeeds(
        folder=folder,
        dtype="bfloat16",
        threads=torch.get_num_threads(),
        max_context=WINDOW,
        max_sequences=1,
        num_tokens=WINDOW,
        kv_bytes_per_token=step_needs(load_model_config(folder)).kv_bytes_per_token,
        step_tokens=WINDOW,
    )
    found = {}
    for name, python in pythons.items():
        with PeerProcess(name, python, needs) as peer:
            loss = sum(peer.loss(window) for window in windows)
            tokens = sum(len(window) - 1 for window in windows)
            found[peer.version] = Sums(bits_per_weight(folder), tokens, loss)
    return found


def _add(sums: Sums, odds: torch.Tensor, expected: torch.Tensor, following: torch.Tensor) -> None:
    sums.tokens += len(following)
    sums.loss += float(cross_entropy(odds, following, reduction="sum"))
    sums.divergence += float((expected.exp() * (expected - odds)).sum())
    sums.agreeing += int((odds.argmax(-1) == expected.argmax(-1)).sum())


def report(sums: Mapping[Kind, Sums], peers: Mapping[str, Sums]) -> Table:
    """One row for each kind and each peer."""
    table = Table(
        "weights",
        "bits per weight",
        "perplexity",
        "over the first",
        "divergence, nats",
        "same best token",
    )
    first = next(iter(sums.values()))
    rows = {kind.label: each for kind, each in sums.items()} | dict(peers)
    for label, each in rows.items():
        table.add_row(
            label,
            "" if (found := each.bits_per_weight) is None else f"{found:.2f}",
            f"{math.exp(each.loss / each.tokens):.3f}",
            f"{math.exp((each.loss - first.loss) / each.tokens):.4f}x",
            "" if label in peers else f"{each.divergence / each.tokens:.5f}",
            "" if label in peers else f"{each.agreeing / each.tokens:.2%}",
        )
    return table


def main() -> int:
    """The command line."""
    options = _parser().parse_args()
    try:
        kinds = kinds_of(options)
        text = held_text() if options.text is None else options.text.read_text()
        pythons = interpreters(options.peer_python)
        names, missing = installed_peers(options.peers, pythons)
        if missing:
            raise BatonError("; ".join(missing))
        folder = resolve_model(options.model)
        with tempfile.TemporaryDirectory() as place:
            made = {each: Path(each) for each in options.quantized}
            for each in {kind.format for kind in kinds if kind.format}.difference(made):
                made[each] = folder_in_format(options.model, each, Path(place))
            sums = compare(folder, kinds, text, options.tokens, made)
        windows = windows_of(folder, text, options.tokens)
        peers = read_by_peers(folder, {name: pythons[name] for name in names}, windows)
    except (BatonError, OSError) as error:
        print(f"bench.accuracy: {error}", file=sys.stderr)
        return 2
    console = Console(width=max(Console().width, 120))
    console.print(
        f"{options.model}: {next(iter(sums.values())).tokens:,} tokens, {WINDOW} a window"
    )
    console.print(report(sums, peers))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    model = "a checkpoint's folder, or a GGUF file"
    parser.add_argument("--model", default=str(DEMO_MODEL), help=model)
    parser.add_argument("--weights", default="auto,int8,int4", help=", ".join(BITS))
    parser.add_argument("--kv-dtype", default="auto", help=", ".join(KV_DTYPES))
    parser.add_argument("--activations", default="auto", help=", ".join(ACTIVATIONS))
    parser.add_argument("--formats", default="", help=", ".join(FORMATS))
    quantized = "a folder with the same model, quantized; may be given several times"
    parser.add_argument("--quantized", action="append", default=[], help=quantized)
    text = "a file; none: Python's own documentation strings"
    parser.add_argument("--text", type=Path, help=text)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--peers", default="", help="llama.cpp, ik_llama.cpp")
    parser.add_argument("--peer-python", action="append", default=[], help="NAME=PYTHON")
    return parser


def kinds_of(options: argparse.Namespace) -> list[Kind]:
    """Every combination of the flags, then every format and quantized folder with each kind of
    activations. Raises BatonError for a value that a flag does not have."""
    chosen = []
    for flag, known in (
        ("weights", BITS),
        ("kv_dtype", KV_DTYPES),
        ("activations", ACTIVATIONS),
    ):
        chosen.append(getattr(options, flag).split(","))
        unknown = set(chosen[-1]).difference(known)
        if unknown:
            name = "--" + flag.replace("_", "-")
            raise BatonError(f"{name}: {unknown.pop()!r} is not one of {', '.join(known)}")
    formats = [*filter(None, options.formats.split(",")), *options.quantized]
    in_formats = itertools.product(formats, chosen[-1])
    return [
        *(Kind(*each) for each in itertools.product(*chosen)),
        *(Kind(activations=activations, format=each) for each, activations in in_formats),
    ]


if __name__ == "__main__":
    sys.exit(main())
