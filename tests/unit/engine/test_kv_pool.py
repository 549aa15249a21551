"""The pool's memory: shape, views, foreign buffers, and how many blocks fit."""

from __future__ import annotations

import sys

import msgspec
import psutil
import pytest
import torch

from engine.device import available_bytes, torch_dtype
from engine.kv_pool import KvPool, blocks_for_fraction, blocks_for_memory, check_room
from protocol.errors import ConfigError
from protocol.layout import KvLayout


def layout(dtype: str = "float32") -> KvLayout:
    return KvLayout(
        model_fingerprint="x", dtype=dtype, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8
    )


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_block_is_one_contiguous_range_over_all_layers(dtype, size):
    pool = KvPool(layout(dtype), 5)
    assert pool.tensor.shape == (5, 3, 2, 2, 4, 8)
    assert pool.tensor.dtype == torch_dtype(dtype)
    assert pool.tensor.is_contiguous()
    assert not pool.tensor.any()
    assert pool.block_bytes == 3 * 2 * 2 * 4 * 8 * size
    assert pool.tensor.nbytes == 5 * pool.block_bytes
    assert pool.tensor[3].data_ptr() == pool.base_address + 3 * pool.block_bytes


def test_a_pool_of_latents_holds_one_row_per_token_and_layer():
    """The 576 numbers of DeepSeek's models, and nothing beside them."""
    latents = msgspec.structs.replace(
        layout("bfloat16"), num_planes=1, num_kv_heads=1, head_dim=576
    )
    pool = KvPool(latents, 5)
    assert pool.tensor.shape == (5, 3, 1, 1, 4, 576)
    assert pool.tensor.nbytes == 5 * 3 * 4 * 576 * 2
    pool.layer(1)[4, 0, 0, 2, 7] = 3.0
    assert pool.digest(4) != pool.digest(3) == KvPool(latents, 1).digest(0)


def test_a_layer_is_a_view():
    pool = KvPool(layout(), 5)
    pool.layer(1)[4, 1, 0, 2, 7] = 3.0
    assert pool.layer(1).shape == (5, 2, 2, 4, 8)
    assert pool.tensor[4, 1, 1, 0, 2, 7] == 3.0
    assert pool.tensor.sum() == 3.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pool_in_a_foreign_buffer(dtype):
    memory = bytearray(b"\xff" * (2 * layout(dtype).block_bytes + 64))
    pool = KvPool(layout(dtype), 2, buffer=memoryview(memory))
    assert bytes(memory[:-64]) == bytes(len(memory) - 64)  # zeroed
    assert bytes(memory[-64:]) == b"\xff" * 64  # and nothing beyond
    pool.tensor[1, 0, 0, 0, 0, 0] = 1.0
    assert any(memory[pool.block_bytes : pool.block_bytes + 4])
    memory[0:4] = b"\x00\x00\x80\x3f"  # 1.0 as float32, little-endian
    if dtype == "float32":
        assert pool.tensor.flatten()[0] == 1.0


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (memoryview(bytearray(100)), "100 bytes"),
        (memoryview(bytes(100_000)), "read-only"),
    ],
    ids=["small", "read-only"],
)
def test_buffers_that_cannot_hold_it(buffer, words):
    with pytest.raises(ValueError, match=words):
        KvPool(layout(), 2, buffer=buffer)


def test_a_pool_needs_a_block():
    with pytest.raises(ConfigError, match="at least 1 block"):
        KvPool(layout(), 0)


def test_blocks_for_memory():
    size = layout().block_bytes
    assert blocks_for_memory(layout(), 10 * size) == 10
    assert blocks_for_memory(layout(), 10 * size - 1) == 9
    with pytest.raises(ConfigError, match=f"{size - 1} bytes .* {size} bytes"):
        blocks_for_memory(layout(), size - 1)


def test_blocks_for_a_fraction_of_the_free_memory():
    device = torch.device("cpu")
    size = layout().block_bytes
    assert 0 < available_bytes(device) <= psutil.virtual_memory().total
    half, all_of_it = (blocks_for_fraction(layout(), device, f) for f in (0.5, 1.0))
    assert 0 < half < all_of_it <= psutil.virtual_memory().total // size


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01])
def test_fractions_outside_the_range(fraction):
    with pytest.raises(ConfigError, match="fraction"):
        blocks_for_fraction(layout(), torch.device("cpu"), fraction)


def test_unknown_dtypes_are_refused():
    with pytest.raises(ConfigError, match=r"'int8'.*float32"):
        torch_dtype("int8")


def test_a_pool_that_the_host_has_no_room_for_is_refused_before_it_is_touched():
    device = torch.device("cpu")
    check_room(10 * layout().block_bytes, 10, device)
    too_many = 2 * psutil.virtual_memory().total // layout().block_bytes
    with pytest.raises(ConfigError, match=rf"{too_many} KV blocks take \d+ MiB, and \d+ MiB"):
        check_room(too_many * layout().block_bytes, too_many, device)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says which pages are resident")
def test_the_whole_pool_is_resident_from_the_start():
    before = psutil.Process().memory_info().rss
    pool = KvPool(layout(), 40_000)
    assert psutil.Process().memory_info().rss - before > 0.9 * pool.tensor.nbytes
