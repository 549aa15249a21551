"""For a process of its own, in which nothing has asked oneDNN yet what the CPU can do."""

from __future__ import annotations

import os

import torch

from engine.layers.linear import TorchLinear, WidenedLinear, torch_linear


def check_layers() -> None:
    """On a CPU that does not multiply bf16, only weights in bf16 are widened."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    wanted = {torch.bfloat16: WidenedLinear, torch.float32: TorchLinear}
    found = {dtype: type(torch_linear(torch.zeros((8, 8), dtype=dtype))) for dtype in wanted}
    assert found == wanted
