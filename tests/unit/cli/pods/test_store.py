"""`baton store`: a real server with a password, that keeps its data where it is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from cli.main import main
from tests.paths import ROOT
from tests.ports import held_port

PASSWORD = "a-password-of-tests"


@contextmanager
def running(port: int, folder: Path) -> Iterator[redis.Redis]:
    command = [sys.executable, "-m", "cli.main", "store", f"--port={port}", f"--data-dir={folder}"]
    environ = {**os.environ, "BATON_STORE_PASSWORD": PASSWORD}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)
    try:
        patient = Retry(ConstantBackoff(0.05), 1200)
        with redis.Redis(port=port, password=PASSWORD, retry=patient) as client:
            client.ping()
            assert PASSWORD not in " ".join(psutil.Process(process.pid).cmdline())
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_the_server_needs_the_password_and_keeps_its_data(tmp_path: Path) -> None:
    with held_port() as holder:
        port = holder.getsockname()[1]
        with running(port, tmp_path) as client:
            client.set("a", "b")
            with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.get("a")
        with running(port, tmp_path) as client:
            assert client.get("a") == b"b"


@pytest.mark.parametrize(
    ("environ", "flags", "message"),
    [
        ({}, [], "store_password is required: give BATON_STORE_PASSWORD"),
        ({"BATON_STORE_PASSWORD": "has/a/slash/and@more"}, [], "matching"),
        ({"BATON_STORE_PASSWORD": PASSWORD}, ["--data-dir=/no/such"], "is not a folder"),
    ],
)
def test_what_it_cannot_run_with_is_one_line(environ, flags, message, monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("the server starts"))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    try:
        status = main(["store", *flags])
    except SystemExit as done:
        status = done.code
    shown = capsys.readouterr().err
    assert status == 2
    assert message in shown
    assert shown.count("\n") == 1
