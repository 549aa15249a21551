"""What layers of few rows ask the memory for: each line once, from eight pages in turn."""

from __future__ import annotations

import ctypes
import functools
import itertools
import subprocess
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from engine.cpu.native_linear import NativeLinear
from engine.native import library
from tests.effort import some
from tests.unit.engine.native.instruction_sets import (
    instruction_sets_with_products,
    kernels_for,
    native_sources,
)

INPUTS, OUTPUTS = 1280, 512
LINE, PAGE, PAGES = 64, 4096, 8
BLOCK = PAGE * PAGES

NOTING = """
#include <cstdint>
#include <vector>

static std::vector<uintptr_t> asked;

#include "simd.h"
#define __builtin_prefetch(at, ...) asked.push_back((uintptr_t)(at))
#include "linear.cpp"
#include "narrow_linear.cpp"
#include "block_rows.cpp"

extern "C" {

void multiply(const baton::LinearCall* call) { baton::linear(*call); }

// How many of the lines that were asked for lie within so many bytes, and which, in order.
int64_t asked_for(uintptr_t from, int64_t bytes, int64_t* lines) {
  int64_t count = 0;
  for (const uintptr_t at : asked)
    if (at - from < (uintptr_t)bytes) lines[count++] = (int64_t)(at - from) / 64;
  asked.clear();
  return count;
}

}
"""


@pytest.fixture(scope="module")
def noting(tmp_path_factory) -> Callable[[str], ctypes.CDLL]:
    """noting(instruction_set): linear layers, by one thread, that write down what they ask for."""

    @functools.cache
    def build(instruction_set: str) -> ctypes.CDLL:
        if instruction_set not in instruction_sets_with_products():
            pytest.skip(f"this CPU has no {instruction_set}")
        folder = tmp_path_factory.mktemp("noting")
        native_sources(folder)
        source, built = folder / "noting.cpp", folder / "noting.so"
        source.write_text(NOTING)
        flags = ["-O1", "-std=c++17", "-fPIC", "-Wno-psabi"]
        flags += library._machine_flags(instruction_set)
        compiler = library.find_compiler()
        subprocess.run([compiler, *flags, "-shared", str(source), "-o", str(built)], check=True)
        return ctypes.CDLL(str(built))

    return build


def lines_asked_for(library: ctypes.CDLL, layer: NativeLinear) -> list[int]:
    """Of the layer's panels since the last call, in order, counted from a block's border."""
    begin = layer.weight.panels
    into_block = begin % BLOCK // LINE
    found = (ctypes.c_int64 * 100_000)()
    count = library.asked_for(
        ctypes.c_uint64(begin), ctypes.c_int64(layer.num_bytes), ctypes.byref(found)
    )
    return [line + into_block for line in found[:count]]


@pytest.mark.nightly  # it compiles the kernels once more
@pytest.mark.parametrize("bits", [16, 12])
@pytest.mark.parametrize(
    ("instruction_set", "rows"),
    [
        *(("amx_bf16", rows) for rows in (1, 16, 17, 32)),
        *((name, rows) for name in some(("avx2", "avx512"), 1) for rows in (1, 6)),
    ],
)
def test_each_line_once_and_eight_pages_in_turn(noting, instruction_set, rows, bits):
    notes = noting(instruction_set)
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn((OUTPUTS, INPUTS), generator=generator).bfloat16()
    x = torch.randn((rows, INPUTS), generator=generator).bfloat16()
    layer = NativeLinear(weight, None, kernels_for(instruction_set), bits)
    expected = layer(x)
    layer._multiply = notes.multiply
    lines_asked_for(notes, layer)
    assert torch.equal(layer(x), expected)
    asked = lines_asked_for(notes, layer)

    first, last = layer.weight.panels, layer.weight.panels + OUTPUTS * INPUTS * bits // 8
    unasked = (BLOCK - first % BLOCK) // LINE  # of the block that the layer begins in
    to_come = (last - first) // LINE - unasked
    assert min(asked) == BLOCK // LINE
    assert len(set(asked)) >= 0.98 * to_come
    assert max(Counter(asked).values()) <= 2
    assert len(asked) <= 1.02 * to_come
    pages = [line * LINE // PAGE % PAGES for line in asked]
    in_turn = sum(b == (a + 1) % PAGES for a, b in itertools.pairwise(pages))
    assert in_turn >= 0.95 * len(asked)
