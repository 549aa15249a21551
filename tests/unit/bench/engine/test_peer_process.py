"""A peer in a process of its own: asked, stopped between questions, and its end explained."""

from __future__ import annotations

import sys

import psutil
import pytest

from bench.engine import peer_process
from bench.engine.peer_process import PeerKind, PeerProcess, installed_peers, interpreters
from bench.engine.workloads import EngineNeeds
from protocol.errors import BatonError
from tests.paths import ROOT

SCRIPT = """
import sys
sys.path.insert(0, {peers!r})
from answer import answer
class Fake:
    vocab_size = 100
    def __init__(self, needs):
        print("a peer may print while it loads")
        self.version = f"fake {{needs.threads}}"
    def prefill(self, prompt):
        if len(prompt) == 13:
            raise RuntimeError("thirteen")
        return float(len(prompt))
    def decode(self, prompts, steps):
        return float(len(prompts) * 1000 + len(prompts[0]) + steps)
    {loss}
answer(Fake)
"""


LOSS = "loss = lambda self, window: window[-1] / 4"


@pytest.fixture(params=[LOSS], ids=["reader"])
def fake(request, tmp_path, monkeypatch):
    script = tmp_path / "run_fake.py"
    script.write_text(SCRIPT.format(peers=str(ROOT / "bench" / "peers"), loss=request.param))
    monkeypatch.setitem(peer_process.PEERS, "fake", PeerKind(str(script), "json", "it is there"))
    needs = EngineNeeds(tmp_path / "model", "bfloat16", 1, 64, 1, 64, 2**20, 64)
    with PeerProcess("fake", sys.executable, needs) as process:
        yield process


def test_it_answers_and_stands_still_between_questions(fake):
    assert fake.version == "fake 1"
    assert fake.seconds(1, 30, 0, "seed") == 30.0
    assert fake.seconds(8, 30, 5, "seed") == 8035.0
    assert fake.loss([3, 4, 5]) == 1.25
    process = psutil.Process(fake._process.pid)
    assert process.status() == psutil.STATUS_STOPPED


def test_one_that_says_nothing_is_given_up(tmp_path, monkeypatch):
    script = tmp_path / "run_silent.py"
    script.write_text("import sys\nprint('well', file=sys.stderr)\nsys.stdin.read()")
    monkeypatch.setitem(peer_process.PEERS, "silent", PeerKind(str(script), "json", "it is there"))
    needs = EngineNeeds(tmp_path / "model", "bfloat16", 1, 64, 1, 64, 2**20, 64)
    before = psutil.Process().children()
    with pytest.raises(BatonError, match=r"silent said nothing for 0.5 s"):
        PeerProcess("silent", sys.executable, needs, patience_s=0.5)
    assert psutil.Process().children() == before


def test_its_end_is_explained(fake):
    with pytest.raises(BatonError, match=r"(?s)fake ended: .*thirteen"):
        fake.seconds(1, 13, 0, "seed")


@pytest.mark.parametrize("fake", [""], ids=["no reader"], indirect=True)
def test_one_that_reads_no_text_says_so(fake):
    assert fake.seconds(1, 30, 0, "seed") == 30.0
    with pytest.raises(BatonError, match="fake 1 reads no text here"):
        fake.loss([3, 4, 5])


def test_peers_are_looked_for_where_they_are_said_to_be():
    assert interpreters(["vllm=/opt/vllm/bin/python"])["vllm"] == "/opt/vllm/bin/python"
    with pytest.raises(BatonError, match="NAME=PYTHON"):
        interpreters(["vllm"])
    pythons = interpreters([])
    assert installed_peers("transformers", pythons) == (["transformers"], [])
    with pytest.raises(BatonError, match="cannot be run"):
        installed_peers("vllm", pythons | {"vllm": "/nowhere/python"})
