"""Lines of any process as JSON, and the pump that reads them."""

from __future__ import annotations

import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process.line_pump import LinePump
from process.log_lines import json_line

NOW = 1_700_000_000.5


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "[1763300000.250000] [pod:7    :0]        tcp_ep.c:123  UCX  WARN  no route",
            (1763300000.25, "warning", "ucx", "no route"),
        ),
        ("[1.5] [h:1:0] a.c:1 UCX DIAG x", (1.5, "info", "ucx", "x")),
        ("[1.5] [h:1:0] a.c:1 UCX TRACE_DATA x", (1.5, "debug", "ucx", "x")),
        (
            "12:M 25 Nov 2026 13:00:00.123 * Ready to accept connections tcp",
            (NOW, "info", "valkey", "Ready to accept connections tcp"),
        ),
        (
            "12:M 25 Nov 2026 13:00:00.123 # WARNING Memory overcommit",
            (NOW, "warning", "valkey", "WARNING Memory overcommit"),
        ),
        (
            "E1125 13:00:00.123456   42 nixl_agent.cpp:12] no backend",
            (NOW, "error", "nixl", "nixl_agent.cpp:12] no backend"),
        ),
        ("Traceback (most recent call last):", (NOW, "info", "output", None)),
        ("{not json", (NOW, "info", "output", None)),
        ('{"level": "info"}', (NOW, "info", "output", None)),
        ("", (NOW, "info", "output", None)),
    ],
)
def test_lines_of_others(line: str, expected: tuple[float, str, str, str | None]) -> None:
    time_s, level, logger, message = expected
    assert json.loads(json_line(line, "decode-1", NOW)) == {
        "time": time_s,
        "level": level,
        "who": "decode-1",
        "logger": logger,
        "message": line if message is None else message,
    }


def test_our_own_lines_stay_as_they_are() -> None:
    line = '{"time": 1.0, "level": "info", "who": "d", "logger": "x", "message": "a\\nb"}'
    assert json_line(line + "\n", "other", NOW) == line


@given(st.text())
def test_whatever_is_written_is_one_object_on_one_line(text: str) -> None:
    found = json_line(text, "w", NOW)
    assert "\n" not in found
    assert "\r" not in found or not text.startswith("{")
    assert json.loads(found)["who"] == "w"


def test_a_pump_takes_all_lines_and_keeps_the_last() -> None:
    read, write = os.pipe()
    taken: list[str] = []
    pump = LinePump(os.fdopen(read, "rb"), taken.append)
    with os.fdopen(write, "wb") as stream:
        for number in range(500):
            stream.write(b"line %d\r\n" % number)
        stream.write(b"\xff no end")
    pump.join(30)
    assert taken == [*(f"line {number}" for number in range(500)), "\ufffd no end"]
    assert pump.tail(2) == ["line 499", "\ufffd no end"]
    assert "baton-output" not in {each.name for each in threading.enumerate()}
