"""How OpenMP's threads are told to wait, which only a process before torch can be."""

from __future__ import annotations

import os

import pytest

from process.openmp import SPINS, let_threads_sleep


@pytest.fixture(autouse=True)
def _untold(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


def test_they_spin_for_a_short_time(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    let_threads_sleep()
    assert os.environ["GOMP_SPINCOUNT"] == str(SPINS)


@pytest.mark.parametrize(
    ("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")]
)
def test_what_the_operator_said_stays(monkeypatch, name, value):
    monkeypatch.setattr(os, "environ", {**os.environ, name: value})
    before = dict(os.environ)
    let_threads_sleep()
    assert os.environ == before
