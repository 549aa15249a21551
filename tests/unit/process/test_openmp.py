"""How OpenMP's threads are told to wait, which only a process before torch can be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from process.openmp import SPINS, prepare_openmp
from tests.paths import ROOT


@pytest.fixture(autouse=True)
def _untold(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


def test_they_spin_for_a_short_time(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    prepare_openmp()
    assert os.environ["GOMP_SPINCOUNT"] == str(SPINS)


@pytest.mark.parametrize(
    ("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")]
)
def test_what_the_operator_said_stays(monkeypatch, name, value):
    monkeypatch.setattr(os, "environ", {**os.environ, name: value})
    before = dict(os.environ)
    prepare_openmp()
    assert os.environ == before


PINNING = (("OMP_PROC_BIND", "true"), ("OMP_PLACES", "cores"), ("GOMP_CPU_AFFINITY", ""))


@pytest.mark.parametrize(
    "variables",
    [
        *(pytest.param({name: value}, marks=pytest.mark.nightly) for name, value in PINNING),
        {**dict(PINNING), "OMP_NUM_THREADS": "", "OMP_WAIT_POLICY": ""},
    ],
    ids=str,
)
def test_torch_pins_no_thread_and_complains_of_nothing(variables: dict[str, str]) -> None:
    """All of these variables are usual where MPI programs run, and in forms that are not filled
    in."""
    code = (
        "import os; from process.openmp import prepare_openmp; before = os.sched_getaffinity(0);"
        "prepare_openmp(); import torch; print(os.sched_getaffinity(0) == before)"
    )
    kept = {name: text for name, text in os.environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | variables, cwd=ROOT, text=True, timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"
