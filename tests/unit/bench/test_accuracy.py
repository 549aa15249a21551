"""The accuracy benchmark on the bundled model: fewer bits move the odds further."""

from __future__ import annotations

import argparse
import io
import math
import sys

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from rich.console import Console

from bench.accuracy import (
    Kind,
    Sums,
    compare,
    held_text,
    kinds_of,
    pick_device,
    read_by_peers,
    report,
    windows_of,
)
from bench.engine import peer_process
from bench.engine.limits import bits_per_weight
from bench.engine.peer_process import PeerKind
from bench.tools.gguf_conversion import finish
from bench.tools.gguf_formats import requantized
from engine.native.library import KernelsUnavailable, load_library
from protocol.errors import BatonError
from tests.gguf_files import write_metadata
from tests.paths import DEMO_MODEL, ROOT

FOLDER = DEMO_MODEL


def test_fewer_bits_move_the_odds_further():
    try:
        if not load_library().baton_has_linear():
            pytest.skip("this CPU has no bf16 products")
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    kinds = [Kind("auto"), Kind("int8"), Kind("int4"), Kind("auto", "fp8")]
    sums = compare(FOLDER, kinds, held_text(), num_tokens=1500)
    plain, eight, four, kv_eight = (sums[kind] for kind in kinds)
    assert {each.tokens for each in sums.values()} == {1500 - 3}
    assert plain.divergence == 0
    assert plain.agreeing == plain.tokens
    assert 0 < eight.divergence < four.divergence
    assert 0 < kv_eight.divergence < four.divergence
    assert plain.agreeing > eight.agreeing > four.agreeing
    assert math.isfinite(four.loss)
    assert report(sums, {}).row_count == 4
    assert [kind.label for kind in kinds] == ["auto", "int8", "int4", "auto, KV fp8"]


def test_activations_in_8_bits_move_the_odds_a_little():
    try:
        has_int8 = load_library().baton_has_int8()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    kinds = [Kind("int8"), Kind("int4"), Kind("int8", activations="int8")]
    if not has_int8:
        with pytest.raises(BatonError, match="no activations in int8"):
            compare(FOLDER, kinds, held_text(), num_tokens=100)
        return
    sums = compare(FOLDER, kinds, held_text(), num_tokens=1500)
    plain, four, rounded = (sums[kind] for kind in kinds)
    assert 0 < rounded.divergence < four.divergence / 4
    assert rounded.agreeing > 0.95 * plain.tokens
    assert kinds[-1].label == "int8, activations int8"


def test_fp8_is_measured_on_a_card_with_what_a_card_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device([Kind("auto"), Kind("int8"), Kind("auto", "fp8")]).type == "cpu"
    with pytest.raises(BatonError, match="torch sees none"):
        pick_device([Kind("auto"), Kind("fp8")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device([Kind("auto"), Kind("fp8")]).type == "cuda"
    with pytest.raises(BatonError, match="int8"):
        pick_device([Kind("auto"), Kind("fp8"), Kind("int8")])
    with pytest.raises(BatonError, match="KV in fp8 is measured on a CPU"):
        pick_device([Kind("fp8"), Kind("auto", "fp8")])
    with pytest.raises(BatonError, match="activations in int8 are for a CPU"):
        pick_device([Kind("fp8"), Kind("auto", activations="int8")])


UNIFORM = """
import math, sys
sys.path.insert(0, {peers!r})
from answer import answer
class Uniform:
    version, vocab_size = "uniform 1", 8
    def __init__(self, needs):
        self.needs = needs
    def prefill(self, prompt): ...
    def decode(self, prompts, steps): ...
    def loss(self, window):
        assert len(window) <= self.needs.max_context
        return (len(window) - 1) * math.log(self.vocab_size)
answer(Uniform)
"""


def test_a_peer_reads_the_same_windows(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.symlink_to(FOLDER)
    script = tmp_path / "run_uniform.py"
    script.write_text(UNIFORM.format(peers=str(ROOT / "bench" / "peers")))
    monkeypatch.setitem(peer_process.PEERS, "uniform", PeerKind(str(script), "json", "is there"))
    windows = windows_of(folder, held_text(), num_tokens=1025)
    assert [len(window) for window in windows] == [512, 512]  # one token predicts nothing
    ((name, sums),) = read_by_peers(folder, {"uniform": sys.executable}, windows).items()
    assert (name, sums.tokens) == ("uniform 1", 1022)
    assert math.exp(sums.loss / sums.tokens) == pytest.approx(8.0)
    assert sums.bits_per_weight == bits_per_weight(folder) == 16.0


def test_a_peers_row_has_its_perplexity_over_the_first_kinds():
    ours = Sums(5.0, tokens=10, loss=10 * math.log(4), divergence=1.0, agreeing=9)
    theirs = Sums(4.5, tokens=10, loss=10 * math.log(6))
    console = Console(file=io.StringIO(), width=120)
    console.print(report({Kind("auto"): ours}, {"peer 1": theirs}))
    auto, peer = (
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in console.file.getvalue().splitlines()
        if line.startswith("│")
    )
    assert auto == ["auto", "5.00", "4.000", "1.0000x", "0.10000", "90.00%"]
    assert peer == ["peer 1", "4.50", "6.000", "1.5000x", "", ""]


def test_a_file_is_read_in_other_formats_too(tmp_path):
    """Q8_0 keeps more of the weights than Q4_0, and each is what the package gguf makes of them."""
    source = tmp_path / "model.gguf"
    config = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    config |= {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4}}
    chance = np.random.default_rng(1)
    matrix, vector = (chance.normal(size=size).astype(np.float32) for size in ((96, 64), 64))
    writer = gguf.GGUFWriter(source, "llama")
    write_metadata(writer, "llama", config)
    writer.add_tensor("blk.0.ffn_up.weight", matrix)
    writer.add_tensor("output_norm.weight", vector)
    finish(writer)
    before, errors = gguf.GGUFReader(source), []
    for name in ("Q8_0", "Q4_0"):
        made = gguf.GGUFReader(requantized(source, name, tmp_path / f"{name}.gguf"))
        kinds = {each.name: each.tensor_type.name for each in made.tensors}
        assert kinds == {"blk.0.ffn_up.weight": name, "output_norm.weight": "F32"}
        told = {key: field.contents() for key, field in made.fields.items() if "GGUF" not in key}
        assert told == {k: f.contents() for k, f in before.fields.items() if "GGUF" not in k}
        up = next(each for each in made.tensors if "ffn" in each.name)
        errors.append(np.abs(dequantize(np.asarray(up.data), up.tensor_type) - matrix).max())
    assert 0 < errors[0] < errors[1] / 8
    with pytest.raises(BatonError, match="'Q2_K' is not one of Q8_0"):
        requantized(source, "Q2_K", tmp_path / "no.gguf")


def test_flags_are_combined_and_formats_are_read_with_each_kind_of_activations():
    flags = {"weights": "auto", "kv_dtype": "auto", "activations": "auto,int8", "formats": "Q8_0"}
    options = argparse.Namespace(**flags, quantized=["of"])
    labels = ["auto", "auto, activations int8", "Q8_0", "Q8_0, activations int8"]
    labels += ["of", "of, activations int8"]
    assert [kind.label for kind in kinds_of(options)] == labels
    options.kv_dtype = "fp9"
    with pytest.raises(BatonError, match="--kv-dtype: 'fp9' is not one of auto, fp8"):
        kinds_of(options)
