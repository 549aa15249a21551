"""`baton trace` against a router that knows the request, and one that does not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cli.main import main as baton
from router.requests.trace import AttemptTrace, RequestTrace
from router.requests.trace_json import trace_json
from router.routing.placement import Candidate, Mode, Placement


def main(argv: list[str]) -> int:
    return baton(["trace", *argv])


KNOWN = trace_json(RequestTrace("cmpl-1-0", 1_000_000, 5, 1_000_010), 1_000_050)


REFUSED = RequestTrace("cmpl-4-0", 1_000_000, 5, 1_000_010, finished_us=1_000_020)
REFUSED.outcome, REFUSED.error = "failed", "target_unreachable"
PLACED = RequestTrace("cmpl-3-0", 1_000_000, 5, 1_000_010)
PLACED.attempts = [
    AttemptTrace(
        1,
        Placement(
            Mode.REMOTE,
            Candidate("d1", 1.0, 1, 1),
            Candidate("p1", 1.0, 1, 1),
            "not cached",
            (),
            (Candidate("p1", 1.0, 1, 1),),
            (),
        ),
        1_000_020,
    )
]
WORKERS = [{"worker_id": "d1", "connected": True}, {"worker_id": "p1", "connected": False}]


def flight(process: str) -> dict[str, object]:
    event = {
        "at_us": 1_000_030, "duration_us": 5, "kind": "step", "request_id": "", "attempt": 0,
        "number": 2, "tokens": 0, "text": "",
    }  # fmt: skip
    return {"process": process, "events": [event]}


ANSWERS: dict[str, object] = {
    "/requests/cmpl-1/trace": KNOWN,
    "/requests/cmpl-3/trace": trace_json(PLACED, 1_000_050),
    "/requests/cmpl-4/trace": trace_json(REFUSED, 1_000_050),
    "/fleet": {"workers": WORKERS},
    "/flight?process=router": flight("router"),
    "/flight?process=d1": flight("d1"),
    "/flight?process=d1&request_id=cmpl-3-0&since_us=900000&until_us=0": flight("d1"),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path in ANSWERS else 404)
        self.end_headers()
        self.wfile.write(json.dumps(ANSWERS.get(self.path, {"error": {}})).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_writes_a_file_for_perfetto(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    assert main(["--router-url", url, "cmpl-1", "--out", str(path)]) == 0
    assert json.loads(path.read_text())["otherData"]["request_id"] == "cmpl-1-0"
    assert "ui.perfetto.dev" in capsys.readouterr().out


def test_a_refused_request_says_why(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--router-url", url, "cmpl-4", "--out", str(tmp_path / "one.json")]) == 0
    assert "refused before workers were chosen: target_unreachable" in capsys.readouterr().out


def test_an_unknown_request_and_a_bad_file(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cmpl-2", f"--router-url={url}"]) == 1
    assert "404" in capsys.readouterr().err
    assert main(["cmpl-1", f"--router-url={url}", f"--out={tmp_path}/no/file"]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_recorders_of_the_request_s_workers_join_its_file(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "three.json"
    assert main(["cmpl-3", f"--router-url={url}", f"--out={path}"]) == 0
    whole = json.loads(path.read_text())["traceEvents"]
    steps = [each for each in whole if each["name"] == "step"]
    assert [each["ts"] for each in steps] == [1_000_030]
    (placed,) = [each for each in whole if each["name"] == "placement"]
    assert placed["args"]["reason"] == "not cached"
    assert placed["args"]["prefill p1"]["cost_ms"] == 1.0
    assert "without the recorder of p1" in capsys.readouterr().err, "it is gone"


@pytest.mark.parametrize(("process", "held"), [("d1", ["d1"]), ("all", ["router", "d1"])])
def test_whole_recorders(url: str, tmp_path: Path, process: str, held: list[str]) -> None:
    path = tmp_path / "whole.json"
    assert main([f"--process={process}", f"--router-url={url}", f"--out={path}"]) == 0
    whole = json.loads(path.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in whole if e["name"] == "process_name"] == held
    assert sum(e["name"] == "step" for e in whole) == len(held)


def test_a_process_that_does_not_answer_is_left_out_of_all(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(ANSWERS, "/flight?process=d1")
    path = tmp_path / "whole.json"
    assert main(["--process=all", f"--router-url={url}", f"--out={path}"]) == 0
    whole = json.loads(path.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in whole if e["name"] == "process_name"] == ["router"]
    assert "without the recorder of d1" in capsys.readouterr().err


def test_an_unknown_process(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--process=d9", f"--router-url={url}"]) == 1
    assert "404" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["a", "b"], ["a", "--process=d1"]])
def test_one_request_is_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "name one request" in capsys.readouterr().err
