"""`baton simulate`: the report as text, JSON and a page; the same seed, the same result."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from protocol.errors import ConfigError
from simulator.commands.output_file import OutputFile
from simulator.router import IDLE_S

SMALL = ["simulate", "--model", "Llama-3-8B", "--trace", "turns:requests=60,rate=20,prompt=300"]
SPLIT = [*SMALL, "--prefill", "1", "--decode", "2"]


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_report_of_a_split_and_a_colocated_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, *SPLIT, "--colocated", "3", "--usd-per-gpu-hour", "2")
    split, colocated = found["fleets"]
    assert split["fleet"] == "1 prefill + 2 decode"
    assert colocated["fleet"] == "3 colocated"
    for each in found["fleets"]:
        assert each["num_served"] == each["num_requests"] >= 60
        assert 0 < each["ttft_ms"]["p50"] <= each["ttft_ms"]["p99"]
        assert 0 <= each["goodput_share"] <= 1
        assert each["hit_share"] > 0.1
        assert each["usd"] == pytest.approx(2 * each["gpu_hours"])
    assert split["split_share"] > 0
    assert split["sent_gb"] > 0
    assert colocated["split_share"] == colocated["sent_gb"] == 0
    assert [each["role"] for each in split["pools"]] == ["prefill", "decode"]


def test_the_same_seed_gives_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    one, same, other = (report(capsys, *SPLIT, "--seed", seed) for seed in ("3", "3", "4"))
    assert json.dumps(one) == json.dumps(same)
    assert one != other


def test_the_table_names_the_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SPLIT, "--ttft-ms", "123", "--tpot-ms", "45"]) == 0
    out = capsys.readouterr().out
    assert "TTFT 123 ms, TPOT 45 ms" in out
    assert "1 prefill + 2 decode" in out


def test_a_report_for_a_closed_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ([], ["--json"]):
        monkeypatch.setattr("sys.stdout", None)
        assert main([*SPLIT, *arguments]) == 0


def test_policies_are_compared_on_several_cores(capsys: pytest.CaptureFixture[str]) -> None:
    policies = ("--policies", "baton,random")
    assert main([*SPLIT, *policies]) == 0
    out = capsys.readouterr().out
    assert "1 prefill + 2 decode, random" in out
    assert "TTFT at most 2000 ms" in out
    one, two = (report(capsys, *SPLIT, *policies, "--jobs", jobs) for jobs in ("1", "2"))
    assert one == two


def test_the_page_is_one_file_that_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert main([*SPLIT, "--html", str(path)]) == 0
    page = path.read_text()
    assert page.count('role="img"') == 5
    assert not re.search(r"https?:|src=|href=|<script|nan", page)
    assert "baton simulate --model Llama-3-8B" in page


def test_a_fleet_that_serves_no_request_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"
    assert main([*SPLIT, "--max-context", "2", "--html", str(path)]) == 1
    page = path.read_text()
    assert "No request was served" in page
    assert "<svg" not in page
    assert "<figure" not in page
    printed = capsys.readouterr()
    assert "too long for a worker's context or pool" in printed.out
    assert printed.err == "baton simulate: no request was served\n"


def test_a_page_is_written_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    page = OutputFile("--html", str(path))
    for former in ("", "the former report"):
        path.write_text(former)
        page.check()
        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_text", _half(Path.write_text))
            with pytest.raises(ConfigError, match=r"--html .*: No space left on device"):
                page.write("the new report")
        assert path.read_text() == former
        assert list(tmp_path.iterdir()) == [path]
    OutputFile("--html", str(tmp_path / "another.html")).check()
    page.write("the new report")
    assert path.read_text() == "the new report"
    assert list(tmp_path.iterdir()) == [path]


def _half(write: Any) -> Any:
    """A write that fills the disk when half is done."""

    def write_text(path: Path, text: str, **options: Any) -> None:
        write(path, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return write_text


def test_messages_arrive_before_idle_workers_report_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, "--decode", "1", "--message-ms", str(1000 * IDLE_S)])
    assert "at most 500" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a fleet"),
        (["--prefill", "1"], "--prefill needs --decode"),
        (["--decode", "1", "--gpu", "abacus"], "use one of H100"),
        (["--decode", "1", "--block-size", "48"], "must be a multiple"),
        (["--decode", "1", "--model", "Llama-3-70B", "--tp", "1"], "raise --tp"),
        (["--decode", "1", "--tp", "3"], "--tp 3: num_attention_heads 32 cannot be split over 3"),
        (["--decode", "1", "--model", "meta-llama/Llama-3.1-8B"], "save its config.json first"),
        (["--decode", "1", "--policies", "bato"], "use one of baton, random"),
        (["--decode", "1", "--html", "/nowhere/x.html"], "--html /nowhere/x.html: No such file"),
        (["--decode", "1", "--html", "~no-user/x"], "--html ~no-user/x: there is no home folder"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main([*SMALL, *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
