"""Events about a pod, written by the real client to an API server on loopback."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from decode_worker.pod_events import Pod, PodEvents, pod_events
from protocol.errors import ServiceError
from tests.unit.cli.pods.api_server import NAMESPACE, SecretsServer, secrets_server

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


def test_a_condition_is_merged_into_the_status_of_this_pod(
    server: SecretsServer, tmp_path: Path
) -> None:
    events = pod_events(NAME, UID, tmp_path)
    assert events is not None
    events.set_condition("baton/PrefillReachable", False, "PrefillUnreachable", "none of 2")
    events.set_condition("baton/PrefillReachable", True, "PrefillReachable", "p1 is back" * 200)
    events.close()
    assert [(name, kind) for name, kind, _ in server.statuses] == [
        (NAME, "application/strategic-merge-patch+json")
    ] * 2
    lost, back = (body for *_, body in server.statuses)
    assert lost["metadata"] == {"uid": UID}
    (condition,) = lost["status"]["conditions"]
    assert condition.pop("lastTransitionTime").endswith("Z")
    assert condition == {
        "type": "baton/PrefillReachable", "status": "False",
        "reason": "PrefillUnreachable", "message": "none of 2",
    }  # fmt: skip
    (condition,) = back["status"]["conditions"]
    assert (condition["status"], len(condition["message"])) == ("True", 1024)


class AwayApi:
    """An API server that is away for the first `num_away` patches; what it took."""

    def __init__(self, num_away: int) -> None:
        self.num_away = num_away
        self.reasons: list[str] = []
        self.has_taken = threading.Event()

    def create_event(self, namespace: str, body: dict[str, Any]) -> None:
        raise AssertionError("no Event was written")

    def patch_status(self, namespace: str, name: str, body: dict[str, Any]) -> None:
        if self.num_away:
            self.num_away -= 1
            raise ServiceError("503 away")
        self.reasons.append(body["status"]["conditions"][0]["reason"])
        self.has_taken.set()


def test_a_condition_is_written_until_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    api = AwayApi(num_away=3)
    events = PodEvents(Pod(NAMESPACE, NAME, UID), api, retry_s=0.01)
    events.set_condition("baton/PrefillReachable", False, "PrefillUnreachable", "x")
    assert api.has_taken.wait(60)
    events.close()
    assert api.reasons == ["PrefillUnreachable"]
    assert caplog.messages == ["the condition baton/PrefillReachable was not written yet: 503 away"]


def test_a_condition_that_changed_meanwhile_is_not_written_any_more() -> None:
    api = AwayApi(num_away=1)
    events = PodEvents(Pod(NAMESPACE, NAME, UID), api, retry_s=3600.0)
    events.set_condition("baton/PrefillReachable", False, "PrefillUnreachable", "x")
    events.set_condition("baton/PrefillReachable", True, "PrefillReachable", "y")
    events.close()
    assert api.reasons == ["PrefillReachable"]


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
