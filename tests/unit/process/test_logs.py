"""Log lines for people and for machines."""

from __future__ import annotations

import errno
import io
import json
import logging
import re

import pytest

from process.logs import LogCounts, about, log_counts, setup_logs
from process.trace_context import CURRENT_TRACE, TraceContext


def written(level: str, format: str) -> list[str]:
    stream = io.StringIO()
    setup_logs("debug", "text", "other", io.StringIO())
    setup_logs(level, format, "decode-1 100%", stream)
    log = logging.getLogger("some.module")
    log.debug("not %s", "shown")
    log.info("hello %s", "wörld")
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    return stream.getvalue().splitlines()


def test_text() -> None:
    lines = written("info", "text")
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
    assert re.fullmatch(time + r" info    decode-1 100% hello wörld", lines[0])
    assert re.fullmatch(time + r" error   decode-1 100% failed", lines[1])
    assert lines[-1] == "ValueError: broken"


def test_json() -> None:
    lines = [json.loads(line) for line in written("info", "json")]
    assert [line["message"] for line in lines] == ["hello wörld", "failed"]
    assert lines[0] == {
        "time": lines[0]["time"],
        "level": "info",
        "who": "decode-1 100%",
        "logger": "some.module",
        "message": "hello wörld",
    }
    assert "ValueError: broken" in lines[1]["error"]


class Disk(io.StringIO):
    """A stream on a disk that may be full."""

    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_lines_that_a_full_disk_refuses_are_lost_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk = Disk()
    setup_logs("info", "text", "router", disk)
    logging.captureWarnings(False)  # of what other tests left to the collector
    log = logging.getLogger("some.module")
    log.info("before")
    disk.is_full = True
    for _ in range(3):
        log.info("lost")
    assert log_counts() == LogCounts(written=1, lost=3)
    disk.is_full = False
    log.info("after")
    assert log_counts() == LogCounts(written=2, lost=3)
    assert "lost" not in disk.getvalue()
    assert capsys.readouterr().err == "", "no traceback, which the disk would not take either"
    log.info("one value too few: %s %s", 1)
    assert "not enough arguments" in capsys.readouterr().err
    assert log_counts().lost == 3


def test_level() -> None:
    assert not any("hello" in line for line in written("warning", "text"))


def test_a_clients_trace_is_named_while_it_is_current() -> None:
    token = CURRENT_TRACE.set(TraceContext("a" * 32, "b" * 16, "c" * 16, "01"))
    try:
        text, lines = written("info", "text"), written("info", "json")
    finally:
        CURRENT_TRACE.reset(token)
    assert text[0].endswith(f"hello wörld (trace {'a' * 32})")
    assert json.loads(lines[0])["trace_id"] == "a" * 32
    assert json.loads(lines[0])["span_id"] == "c" * 16


def test_a_line_about_a_request_names_it_and_its_trace_in_processes_without_a_current_one() -> None:
    stream = io.StringIO()
    for format in ("json", "text"):
        setup_logs("info", format, "decode-1", stream)
        logging.getLogger("some.module").info("failed", extra=about("r-0", "a" * 32))
        logging.getLogger("some.module").info("failed", extra=about("r-1"))
    traced, plain, text, plain_text = stream.getvalue().splitlines()
    assert json.loads(traced)["request_id"] == "r-0"
    assert json.loads(traced)["trace_id"] == "a" * 32
    assert "span_id" not in json.loads(traced)
    assert json.loads(plain)["request_id"] == "r-1"
    assert "trace_id" not in json.loads(plain)
    assert text.endswith(f"failed (trace {'a' * 32})")
    assert plain_text.endswith("failed")
