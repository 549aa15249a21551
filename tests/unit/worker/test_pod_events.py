"""Events about a pod, written by the real client to an API server on loopback."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.unit.cli.pods.api_server import NAMESPACE, SecretsServer, secrets_server
from worker.pod_events import pod_events

NAME, UID = "demo-baton-decode-5c8-x7k2p", "5b1f"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SecretsServer]:
    with secrets_server(tmp_path) as running:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(running.server_port))
        yield running


def test_an_event_names_the_pod_and_what_happened(server: SecretsServer, tmp_path: Path) -> None:
    events = pod_events(NAME, UID, tmp_path)
    assert events is not None
    events.write("PrefillUnreachable", "none of 2 can be reached", is_warning=True)
    events.write("PrefillReachable", "p1 is back" * 200, is_warning=False)
    events.close()
    lost, back = server.events
    assert lost["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "namespace": NAMESPACE, "name": NAME, "uid": UID,
    }  # fmt: skip
    said = (lost["type"], lost["reason"], lost["message"])
    assert said == ("Warning", "PrefillUnreachable", "none of 2 can be reached")
    assert lost["metadata"]["generateName"] == f"{NAME}."
    assert (back["type"], len(back["message"])) == ("Normal", 1024)


def test_what_the_server_refuses_is_logged_and_lost(
    server: SecretsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.verbs.remove("POST")
    events = pod_events(NAME, UID, tmp_path)
    assert events is not None
    events.write("PrefillUnreachable", "x", is_warning=True)
    events.close()
    assert server.events == []
    assert caplog.messages == ["the Event PrefillUnreachable was not written: 403 Forbidden"]


def test_a_server_with_another_certificate_gets_no_token(
    server: SecretsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    events = pod_events(NAME, UID, tmp_path)
    assert events is not None
    events.write("PrefillUnreachable", "x", is_warning=True)
    events.close()
    assert server.calls == []
    assert "certificate verify failed" in caplog.text


def test_outside_of_a_pod_there_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    caplog.set_level(logging.WARNING)
    assert pod_events(None, None, tmp_path) is None
    assert caplog.messages == []
    assert pod_events(NAME, UID, tmp_path) is None, "no token"
    (tmp_path / "namespace").write_text(NAMESPACE)
    assert pod_events(NAME, UID, tmp_path) is None, "no API server"
    assert [message.partition(": ")[0] for message in caplog.messages] == [
        f"no Events of pod {NAME}"
    ] * 2
