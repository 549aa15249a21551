"""A rank holds its own part of a checkpoint and no more, whatever stores the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.model_source import resolve_model
from engine.checkpoint.config import load_model_config
from engine.checkpoint.model_weights import Weights
from engine.checkpoint.quantized_blocks import BlockMatrix, MatrixStack
from engine.checkpoint.shard import Shard
from engine.checkpoint.weights import load_block_weights, load_weights
from tests.gguf_files import write_gguf

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LAYOUTS = [(2, 1), (4, 1), (2, 2), (1, 2)]


def matrices_of(weights: Weights) -> Iterator[Any]:
    yield from (weights.embed, weights.lm_head)
    for layer in weights.layers:
        for half in (layer.attention, layer.feed_forward):
            yield from half.matrices.values()


def bytes_of(matrix: Any) -> int:
    """What a matrix takes; of a mapping that part of the file which is read."""
    if isinstance(matrix, torch.Tensor):
        return matrix.nbytes
    if isinstance(matrix, MatrixStack):
        return sum(bytes_of(part) for part in matrix.parts)
    assert isinstance(matrix, BlockMatrix)
    return sum(part.num_bytes for part in matrix.parts)


@pytest.mark.parametrize("ranks", LAYOUTS)
@pytest.mark.parametrize("stores", ["safetensors", "gguf"])
def test_ranks_hold_all_bytes_once(
    make_tiny: Any, tmp_path: Path, stores: str, ranks: tuple[int, int]
) -> None:
    size, num_stages = ranks
    tiny = make_tiny("LlamaForCausalLM", dtype=torch.bfloat16, head_dim=32, **SIZES)
    folder = tiny.folder
    if stores == "gguf":
        write_gguf(tmp_path / "tiny.gguf", folder, "llama", kind="Q8_0")
        folder = resolve_model(tmp_path / "tiny.gguf")
    config = load_model_config(folder)

    def held(shard: Shard | None) -> int:
        if stores == "gguf":
            weights = load_block_weights(folder, config, torch.bfloat16, shard=shard)
        else:
            weights = load_weights(folder, config, shard=shard)
        return sum(bytes_of(matrix) for matrix in matrices_of(weights))

    numbers = range(size * num_stages)
    parts = [held(Shard.numbered(number, size, num_stages)) for number in numbers]
    assert sum(parts) == held(None)
    for stage in range(num_stages):
        of_stage = parts[stage * size : (stage + 1) * size]
        assert max(of_stage) - min(of_stage) <= 2 * 2 * config.hidden_size  # a token's two rows


def test_a_rank_reads_its_own_rows_of_a_file(make_tiny: Any) -> None:
    """What a rank maps of a matrix is a view of the file at the place of its rows."""
    tiny = make_tiny("LlamaForCausalLM", dtype=torch.bfloat16, **SIZES)
    config = load_model_config(tiny.folder)
    whole = load_weights(tiny.folder, config).embed
    parts = [load_weights(tiny.folder, config, shard=Shard(rank, 4)).embed for rank in range(4)]
    assert isinstance(whole, torch.Tensor)
    for part in parts:
        assert isinstance(part, torch.Tensor)
        assert part.untyped_storage().nbytes() >= whole.nbytes  # a mapping, not a copy
    assert torch.equal(torch.cat([part for part in parts if isinstance(part, torch.Tensor)]), whole)
