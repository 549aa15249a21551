"""A mixture of experts by our own kernels, for bf16 on a CPU: from normed inputs to the sum.

Owns each expert's packed matrices. `native/experts.h` computes: it chooses experts, sorts the
tokens' rows by expert, and reads the matrices of those experts only that have rows. A step runs no
Python for an expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from engine.checkpoint.experts_config import ExpertsConfig
from engine.checkpoint.quantized_blocks import BlockMatrix, Matrix, MatrixStack, as_tensor
from engine.cpu.huge_pages import HugePages
from engine.cpu.native_linear import NativeLinear, Weight, can_pack
from engine.layers.experts import ExpertWeights
from engine.layers.linear import LinearLayer
from engine.layers.ops import LayerOps

_MOST_GAPS = 15
"""The most rows of padding between two experts' rows."""

Pack = Callable[[torch.Tensor | BlockMatrix, torch.Tensor | None], NativeLinear]


class _Router(ctypes.Structure):
    """Mirrors Router in native/routing.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "choice_bias")),
        *((name, ctypes.c_int32) for name in ("hidden", "experts", "per_token", "groups")),
        *((name, ctypes.c_int32) for name in ("chosen_groups", "is_sigmoid", "normalizes")),
        ("sums_two", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class _Weights(ctypes.Structure):
    """Mirrors ExpertsWeights in native/experts.h."""

    _fields_ = (
        ("router", _Router),
        *((name, ctypes.c_void_p) for name in ("gate_up", "down")),
        *((name, Weight) for name in ("shared_gate_up", "shared_down")),
        *((name, ctypes.c_void_p) for name in ("shared_gate", "tally")),
        ("gate", ctypes.c_int64),
    )


class MemoryAddresses(ctypes.Structure):
    """Mirrors ExpertsMemory in native/experts.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "chosen", "weights", "places")),
        *((name, ctypes.c_void_p) for name in ("begins", "counts")),
        *((name, ctypes.c_void_p) for name in ("rows", "gate_up", "gated", "down")),
    )


class _Call(ctypes.Structure):
    """Mirrors ExpertsCall in native/experts.h."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("memory", MemoryAddresses),
        *((name, ctypes.c_void_p) for name in ("x", "add", "out")),
        ("rows", ctypes.c_int64),
        ("num_threads", ctypes.c_int32),
    )


def can_pack_experts(kernels: ctypes.CDLL | None, weights: ExpertWeights) -> bool:
    """Whether the kernels multiply by all of these matrices."""
    shared = [weights.shared_gate_up, weights.shared_down]
    every = [*weights.gate_up, *weights.down, *(each for each in shared if each is not None)]
    return all(_can_pack(kernels, each) for each in every)


def _can_pack(kernels: ctypes.CDLL | None, matrix: Matrix) -> bool:
    if isinstance(matrix, MatrixStack):  # becomes one of bf16
        return kernels is not None and bool(kernels.baton_has_linear())
    return can_pack(kernels, matrix)


class ExpertsMemory:
    """Working memory of the steps of a model's mixtures, which run one after the other; it fits the
    largest step so far. They share a tally, too."""

    def __init__(self, config: ExpertsConfig, hidden: int) -> None:
        self.tally = torch.zeros(3, dtype=torch.int64)
        self._config = config
        self._hidden = hidden
        self._tensors: list[torch.Tensor] = []
        self._most_tokens = -1
        self._addresses = MemoryAddresses()

    def of(self, num_tokens: int) -> MemoryAddresses:
        """The addresses for up to `num_tokens`; valid until a larger number is asked for."""
        if num_tokens > self._most_tokens:
            self._tensors = self._allocated(num_tokens)
            self._addresses = MemoryAddresses(*(each.data_ptr() for each in self._tensors))
            self._most_tokens = num_tokens
        return self._addresses

    def _allocated(self, num_tokens: int) -> list[torch.Tensor]:
        config, hidden, memory = self._config, self._hidden, HugePages()
        count, pairs = config.count, num_tokens * config.per_token
        rows = max(pairs + _MOST_GAPS * min(pairs, count), 1)
        inner = max(config.inner, -(-num_tokens * config.shared_inner // rows))
        chosen = (num_tokens, config.per_token)
        return [
            memory.empty((num_tokens, count), torch.float32),
            memory.empty(chosen, torch.int32),
            memory.empty(chosen, torch.float32),
            memory.empty(chosen, torch.int32),
            memory.empty((count,), torch.int32),
            memory.empty((count,), torch.int32),
            *(
                memory.empty((rows, width), torch.bfloat16)
                for width in (hidden, 2 * inner, inner, hidden)
            ),
        ]


class NativeExperts:
    """See Experts. `pack` makes the packed form of a matrix with its bias; consumes the matrices of
    `weights`. `gate`: the activation, one of `GATES`."""

    def __init__(
        self,
        config: ExpertsConfig,
        weights: ExpertWeights,
        pack: Pack,
        memory: ExpertsMemory,
        kernels: ctypes.CDLL,
        gate: int = 0,
    ) -> None:
        assert can_pack_experts(kernels, weights)
        self.config = config
        self.memory = memory
        self._run = kernels.baton_experts
        self._fp32 = [  # keeps the tensors alive that the structure points to
            None if each is None else each.float().contiguous()
            for each in (
                weights.router,
                weights.router_bias,
                weights.choice_bias,
                weights.shared_gate,
            )
        ]
        self.gate_up = _packed(weights.gate_up, pack, weights.gate_up_bias)
        self.down = _packed(weights.down, pack, weights.down_bias)
        shared = [
            each for each in (weights.shared_gate_up, weights.shared_down) if each is not None
        ]
        weights.shared_gate_up = weights.shared_down = None
        self.shared = _packed(shared, pack)
        self.tally = memory.tally
        self._arrays = [
            (Weight * config.count)(*(layer.weight for layer in layers))
            for layers in (self.gate_up, self.down)
        ]
        *of_router, shared_gate = (None if each is None else each.data_ptr() for each in self._fp32)
        hidden = int(self.gate_up[0].weight.inputs)
        self.weights = _Weights(
            _router(config, hidden, of_router),
            *(ctypes.addressof(array) for array in self._arrays),
            *(layer.weight for layer in self.shared),
        )
        self.weights.shared_gate, self.weights.tally = shared_gate, self.tally.data_ptr()
        self.weights.gate = gate

    @property
    def products(self) -> Sequence[LinearLayer]:
        """See Experts."""
        return (*self.gate_up, *self.down, *self.shared)

    def __call__(self, x: torch.Tensor, ops: LayerOps, add: torch.Tensor | None) -> torch.Tensor:
        """See Experts; `ops` are the kernels' own."""
        assert x.dtype == torch.bfloat16
        x = x.contiguous()
        out = torch.empty_like(x)
        call = _Call(ctypes.addressof(self.weights), self.memory.of(len(x)), x.data_ptr())
        if add is not None:
            assert add.shape == x.shape
            assert add.dtype == torch.bfloat16
            add = add.contiguous()
            call.add = add.data_ptr()
        call.out, call.rows, call.num_threads = out.data_ptr(), len(x), torch.get_num_threads()
        self._run(ctypes.byref(call))
        return out


def _packed(
    matrices: list[Matrix], pack: Pack, biases: Sequence[torch.Tensor] = ()
) -> list[NativeLinear]:
    """The packed forms; consumes `matrices`, so that no layer is in memory twice."""
    matrices.reverse()
    layers: list[NativeLinear] = []
    while matrices:
        matrix = matrices.pop()
        bias = biases[len(layers)] if biases else None
        layers.append(pack(as_tensor(matrix) if isinstance(matrix, MatrixStack) else matrix, bias))
    all_int8 = all(layer.weight.has_int8_inputs for layer in layers)
    for layer in layers:  # one product over all of them, whose inputs are converted once
        layer.weight.has_int8_inputs = all_int8
    return layers


def _router(config: ExpertsConfig, hidden: int, addresses: Sequence[int | None]) -> _Router:
    """`addresses` of the weight, the bias and the bias of the choice."""
    return _Router(
        *addresses,
        hidden,
        config.count,
        config.per_token,
        config.groups,
        config.chosen_groups,
        config.scoring == "sigmoid",
        config.normalizes,
        config.sums_two,
        config.scale,
    )
