"""`baton doctor` against a router with findings, without, and one that is none."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.doctor import main
from console.doctor.doctor import Doctor
from console.doctor.observation import MIN_REQUESTS
from protocol.errors import ConfigError
from tests.unit.console.doctor.mock_fleet import Plan, observe

SLOW = Plan(slow={"decode-1": 1.6})


@pytest.fixture
def router() -> Iterator[ThreadingHTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            is_whole = self.path == "/doctor/observation"
            answer = observation() if is_whole else self.server.diagnosis
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *arguments: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@functools.cache
def observation() -> Any:
    return json.loads(msgspec.json.encode(observe(SLOW)))


def diagnosis_of(plan: Plan) -> dict[str, Any]:
    seen = observe(plan)
    return Doctor().examine(seen).as_json(600, seen.now_us) | {
        "num_requests": len(seen.requests), "min_requests": MIN_REQUESTS,
    }  # fmt: skip


def run(router: ThreadingHTTPServer, diagnosis: Any, *flags: str) -> int:
    router.diagnosis = diagnosis
    return main([f"--router-url=http://127.0.0.1:{router.server_port}", *flags])


def test_findings_are_printed_with_evidence_and_changes(
    router: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(router, diagnosis_of(SLOW)) == 1
    printed = capsys.readouterr().out
    assert "1 finding, 18 checks passed" in printed
    assert "decode-1 is slower than the decode pool" in printed
    assert "◀" in printed
    assert "→ drain decode-1" in printed
    assert "✓ Pools in balance" in printed


def test_a_healthy_fleet_ends_with_0(
    router: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    diagnosis = diagnosis_of(Plan())
    assert run(router, diagnosis) == 0
    assert "The fleet is healthy: 19 checks" in capsys.readouterr().out
    assert run(router, diagnosis, "--json") == 0
    assert json.loads(capsys.readouterr().out) == diagnosis


def test_too_few_requests_and_other_servers_end_with_3(
    router: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(router, diagnosis_of(Plan(seconds=2))) == 3
    assert "judgements of speed need 100 requests" in capsys.readouterr().out.replace("\n", " ")
    assert run(router, ["no", "diagnosis"]) == 3
    assert "is it a router of this version?" in capsys.readouterr().err
    assert main(["--router-url=http://127.0.0.1:9"]) == 3
    assert "no router answers" in capsys.readouterr().err


def test_what_a_router_saw_is_saved_and_examined_elsewhere(
    router: ThreadingHTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "seen.json"
    diagnosis = diagnosis_of(SLOW)
    assert run(router, diagnosis, f"--save={path}") == 1
    assert json.loads(path.read_text()) == observation()
    capsys.readouterr()
    assert main([f"--observation={path}", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)["findings"]
    assert printed == json.loads(json.dumps(diagnosis["findings"]))


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "cannot be read"), ("{}", "not an observation of this version")]
)
def test_a_file_that_is_no_observation(tmp_path: Path, content: str | None, reason: str) -> None:
    path = tmp_path / "seen.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        main([f"--observation={path}"])
