"""Our own bf16 products: against float64, and bit for bit whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.cpu.linear import cpu_linear
from engine.cpu.native_linear import NativeLinear
from engine.layers.linear import TorchLinear, WidenedLinear, has_bf16_products
from tests.effort import pairwise, times


def tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def far_apart(outputs: int, inputs: int) -> torch.Tensor:
    """Random weights, of which one in a few thousand is small, large, or nothing."""
    weight = tensor(0, outputs, inputs)
    flat = weight.view(-1)
    numbers = [0.0, 1e-30, 3e20, -(2.0**-126), 1e-40, *(-(2.0**n) for n in range(-20, 10))]
    for place, number in enumerate(numbers):
        flat[2003 * (place + 1) :: 99_991] = number
    return weight


@pytest.fixture(params=[16, 12])
def native(product_kernels, request):
    return lambda weight, bias=None: NativeLinear(weight, bias, product_kernels, request.param)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pairwise(
    "rows, shape, biased",
    [0, 1, 5, 6, 7, 13, 32, 97, 200, 300],
    [(64, 128), (34, 7), (2, 65), (4200, 70)],
    [False, True],
)
def test_a_product_is_rounded_once(native, rows, shape, biased):
    inputs, outputs = shape
    weight, x, add = tensor(0, outputs, inputs), tensor(1, rows, inputs), tensor(2, rows, outputs)
    bias = tensor(3, outputs) if biased else None
    layer = native(weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    atol = 2**-8 * inputs**0.5
    torch.testing.assert_close(layer(x).double(), exact, rtol=2**-8, atol=atol * 0.1)
    torch.testing.assert_close(
        layer(x, add=add).double(), exact + add.double(), rtol=2**-8, atol=atol
    )
    wide = layer.in_float32(x)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-5 * inputs)


@settings(max_examples=times(12, 60), deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 120) | st.integers(190, 400),
    inputs=st.integers(1, 60).map(lambda n: 2 * n) | st.integers(60, 200).map(lambda n: 2 * n),
    outputs=st.integers(1, 150),
    bits=st.sampled_from([16, 12]),
    data=st.data(),
)
def test_a_row_is_the_same_in_any_batch(product_kernels, rows, inputs, outputs, bits, data):
    layer = NativeLinear(far_apart(outputs, inputs), tensor(1, outputs), product_kernels, bits)
    x, add = tensor(2, rows, inputs), tensor(3, rows, outputs)
    whole = layer(x, add=add)
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    assert torch.equal(layer(x[begin:end], add=add[begin:end]), whole[begin:end])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("inputs", [34, 96, 4200])
def test_many_rows_over_many_panels(native, threads, count, inputs):
    """So many rows that threads divide them, and where they are long each has several blocks."""
    threads(count)
    outputs, rows = 700, 410
    layer, x = native(tensor(0, outputs, inputs)), tensor(1, rows, inputs)
    whole = layer(x)
    assert torch.equal(torch.cat([layer(part) for part in x.split(10)]), whole)
    exact = x.double() @ tensor(0, outputs, inputs).double().T
    atol = 2**-8 * max(1, inputs / 96) ** 0.5
    torch.testing.assert_close(whole.double(), exact, rtol=2**-8, atol=atol)


@pytest.mark.parametrize("rows", [128, 130, 161, 200])
def test_rows_so_long_that_few_fit_a_block(native, threads, rows):
    """No block is empty where blocks are smaller than what is multiplied together."""
    threads(2)
    layer, x = native(tensor(0, 70, 14336)), tensor(1, rows, 14336)
    assert torch.equal(torch.cat([layer(part) for part in x.split(10)]), layer(x))


def test_a_row_is_the_same_with_any_number_of_threads(native, threads):
    layer, x = native(tensor(0, 1000, 96)), tensor(1, 33, 96)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(layer(x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_what_is_not_finite_stays_in_its_row(native):
    x = tensor(0, 8, 32)
    layer = native(tensor(1, 64, 32))
    clean = layer(x)
    x[3, 5] = float("nan")
    dirty = layer(x)
    assert dirty[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(dirty[others], clean[others])


@pytest.fixture
def both(product_kernels):
    """The same weight in sixteen and in twelve bits."""
    return lambda weight: [NativeLinear(weight, None, product_kernels, bits) for bits in (16, 12)]


@pytest.mark.parametrize("rows", [1, 4, 8, 20, 32, 90, 150, 400])
def test_twelve_bits_are_the_same_bits_where_exponents_lie_together(both, rows):
    """Of both signs, all mantissas and sixteen exponents, in every place of a word."""
    numbers = torch.arange(2**12)
    bits = (numbers >> 11 << 15) | ((numbers & 0x7FF) + (112 << 7))
    weight = bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)
    weight = weight[torch.randperm(2**12, generator=torch.Generator().manual_seed(0))]
    plain, narrow = both(weight.repeat(40)[: 200 * 700].view(200, 700))
    assert (plain.weight.bits, narrow.weight.bits) == (16, 12)
    x = tensor(1, rows, 700)
    assert torch.equal(narrow.in_float32(x), plain.in_float32(x))
    assert torch.equal(narrow(x), plain(x))


@pytest.mark.parametrize("rows", [1, 6, 32, 90, 400])
def test_twelve_bits_are_the_same_bits_where_numbers_are_far_apart(both, rows):
    plain, narrow = both(far_apart(300, 1024))
    assert narrow.weight.bits == 12
    x = tensor(1, rows + 1, 1024)
    x[rows, 7] = float("inf")
    expected = plain.in_float32(x)
    assert expected[:rows].abs().max() > 1e18
    assert torch.equal(narrow.in_float32(x).view(torch.int32), expected.view(torch.int32))


@settings(max_examples=times(12, 60), deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40) | st.integers(190, 400),
    words=st.integers(100, 200),
    outputs=st.integers(1, 150),
    places=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 3)), min_size=1, max_size=6),
)
def test_twelve_bits_are_the_same_bits_wherever_a_word_is_plain(
    product_kernels, rows, words, outputs, places
):
    weight = tensor(0, outputs, 2 * words)
    for word, run in places:
        weight[word % outputs, 2 * (word % words) :][: 2 * run + 1] *= 2.0**-40
    plain, narrow = (NativeLinear(weight, None, product_kernels, bits) for bits in (16, 12))
    assume(narrow.weight.bits == 12)  # not too many words are plain
    x = tensor(1, rows, 2 * words)
    assert torch.equal(narrow.in_float32(x), plain.in_float32(x))


def test_twelve_bits_take_three_quarters_or_are_left(both):
    plain, narrow = both(tensor(0, 640, 768))
    assert narrow.weight.bits == 12
    assert narrow.num_bytes / plain.num_bytes == pytest.approx(0.75, abs=0.01)
    zeros = tensor(0, 640, 768)
    zeros[::2, ::2] = 0
    assert both(zeros)[1].weight.bits == 16


def test_what_the_kernel_cannot_take_is_torchs(kernels):
    torchs = TorchLinear if has_bf16_products() else WidenedLinear
    assert isinstance(cpu_linear(tensor(0, 8, 7), kernels=kernels), torchs)
    assert isinstance(cpu_linear(tensor(0, 8, 8).float(), kernels=kernels), TorchLinear)
    assert isinstance(cpu_linear(tensor(0, 8, 8)), torchs)
