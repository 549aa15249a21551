"""`baton store`: a real server with a password, that keeps its data where it is told."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest
import redis
import trustme
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from cli.main import main
from cli.pods.store_front import ServedCertificate
from cli.pods.store_settings import StoreSettings
from process.store.registry import client_from_url, expiry_of
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
        (
            {"BATON_STORE_PASSWORD": PASSWORD},
            ["--plain-idle-s=5"],
            "plain_idle_s needs tls_port",
        ),
        (
            {"BATON_STORE_PASSWORD": PASSWORD},
            ["--tls-port=6380", "--tls-key-file=/k.pem"],
            "tls_key_file needs tls_cert_file",
        ),
        (
            {"BATON_STORE_PASSWORD": PASSWORD},
            ["--tls-port=6380", "--tls-cert-file=/no/such.pem"],
            "tls_cert_file /no/such.pem cannot be used",
        ),
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


@contextmanager
def encrypting(*flags: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A `baton store` with TLS, that serves; its ports with and without TLS."""
    with held_port() as tls_holder, held_port() as plain_holder:
        tls_port, plain_port = (each.getsockname()[1] for each in (tls_holder, plain_holder))
        ports = [f"--port={plain_port}", f"--tls-port={tls_port}"]
        command = [sys.executable, "-m", "cli.main", "store", *ports, *flags]
        environ = {**os.environ, "BATON_STORE_PASSWORD": PASSWORD}
        with subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=PIPE, text=True
        ) as process:
            try:
                line_with(process, "serving with TLS")
                yield process, tls_port, plain_port
            finally:
                process.kill()


def line_with(process: subprocess.Popen[str], text: str) -> str:
    """The next line of the log that has this text."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"ended without {text}")


def client_at(url: str) -> Any:
    return client_from_url(redis.Redis, url, 30.0)


def test_clients_with_and_without_tls_share_one_store_until_none_needs_the_plain_port() -> None:
    """An upgrade from a release without TLS: former pods stay connected, and find their store."""
    with encrypting("--plain-idle-s=0.4") as (process, tls_port, plain_port):
        (valkey,) = psutil.Process(process.pid).children()
        former = client_at(f"redis://:{PASSWORD}@127.0.0.1:{plain_port}")
        new = client_at(f"rediss://:{PASSWORD}@127.0.0.1:{tls_port}?trust=password")
        with former, new:
            former.set("a", "b")
            assert new.get("a") == b"b"
            announced = former.pubsub(ignore_subscribe_messages=True)
            announced.subscribe("news")
            announced.get_message(timeout=30.0)
            new.publish("news", "c")
            message = None
            while message is None:
                message = announced.get_message(timeout=30.0)
            assert message["data"] == b"c"
            announced.close()
        line_with(process, f"no client uses port {plain_port}, which has no TLS: closed")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", plain_port)).close()
        with client_at(f"rediss://:{PASSWORD}@127.0.0.1:{tls_port}?trust=password") as client:
            assert client.get("a") == b"b"
            assert client.config_get("port") == {"port": "0"}
            assert PASSWORD not in " ".join(
                psutil.Process(process.pid).cmdline() + valkey.cmdline()
            )
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert not valkey.is_running()
        assert process.stderr is not None
        assert process.stderr.read() == "", "its clients' connections end without a word"


def test_a_certificate_of_one_s_own_is_served_alone_and_the_server_s_end_is_the_store_s(
    tmp_path: Path,
) -> None:
    ca, file, trusted = trustme.CA(), tmp_path / "cert.pem", tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(str(trusted))
    ends = ending_in(ca, file, days=1.9)
    with encrypting("--plain-idle-s=0", f"--tls-cert-file={file}") as (process, tls_port, plain):
        assert f"the certificate of {file} expires in 2 days" in line_with(process, "expires")
        url = f"rediss://:{PASSWORD}@127.0.0.1:{tls_port}?ssl_ca_certs={trusted}"
        with client_at(url) as client:
            client.ping()
            assert expiry_of(client).at == pytest.approx(ends, abs=1)
        former = f"rediss://:{PASSWORD}@127.0.0.1:{tls_port}?trust=password"
        with client_at(former) as client:
            assert client.ping(), "pods that trust the password's certificate lose nothing"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", plain)).close()
        (valkey,) = psutil.Process(process.pid).children()
        valkey.kill()
        assert process.wait(60) not in (0, None)


async def test_a_certificate_that_changes_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cli.pods.store_front.LOOK_S", 0.001)
    ca, file = trustme.CA(), tmp_path / "cert.pem"
    ending_in(ca, file, days=1)
    settings = StoreSettings(store_password=PASSWORD, tls_port=1, tls_cert_file=str(file))
    certificate = ServedCertificate(settings, tmp_path)
    assert ssl.OP_NO_RENEGOTIATION in certificate.context.options
    with caplog.at_level(logging.INFO):
        watching = asyncio.create_task(certificate.watch())
        async with asyncio.timeout(60):
            while "expires in" not in caplog.text:
                await asyncio.sleep(0)
            ending_in(ca, file, days=100)
            while "new connections get the certificate" not in caplog.text:
                await asyncio.sleep(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def ending_in(ca: trustme.CA, file: Path, days: float) -> float:
    """Write a certificate and its key; returns when it ends."""
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    issued = ca.issue_cert("127.0.0.1", not_after=ends)
    issued.private_key_and_cert_chain_pem.write_to_path(str(file))
    return ends.timestamp()


def test_a_port_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("BATON_STORE_PASSWORD", PASSWORD)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["store", f"--tls-port={port}", "--plain-idle-s=0"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
