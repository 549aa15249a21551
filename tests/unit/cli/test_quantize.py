"""`baton quantize`: a folder that workers serve, and one line for what cannot be quantized."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bench.accuracy import Kind, compare, held_text
from cli.main import main
from engine.native.library import KernelsUnavailable, load_library
from engine.rounding import quantized_checkpoint
from engine.rounding.checkpoint_file import WrittenTensor, write_tensors
from tests.paths import DEMO_MODEL


@pytest.fixture(autouse=True)
def products() -> None:
    try:
        if not load_library().baton_has_linear():
            pytest.skip("this CPU has no bf16 products")
    except KernelsUnavailable as error:
        pytest.skip(str(error))


SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """The default handlers, also in a process that nohup began."""
    former = [signal.signal(each, signal.SIG_DFL) for each in SIGNALS]
    yield
    for each, handler in zip(SIGNALS, former, strict=True):
        signal.signal(each, handler)


def quantize(*flags: str, text: Path, output: Path, model: Path = DEMO_MODEL) -> int:
    names = {"--model": model, "--text": text, "--output": output}
    return main(["quantize", *flags, *(f"{name}={value}" for name, value in names.items())])


def test_a_text_makes_weights_in_4_bits_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for other texts of its kind."""
    text, output = tmp_path / "text", tmp_path / "quantized"
    held = held_text()
    half = len(held) // 2
    text.write_text(held[:half])
    assert quantize("--tokens=3000", text=text, output=output) == 0
    out, err = capsys.readouterr()
    assert out == f"{DEMO_MODEL} is quantized in {output}\n"
    assert err.splitlines() == [f"layer {number} of 4" for number in (1, 2, 3, 4)]
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == ["quantized"]
    kinds = [Kind("auto"), Kind("int4"), Kind(format="quantized")]
    sums = compare(DEMO_MODEL, kinds, held[half:], 1500, {"quantized": output})
    _, four, ours = (sums[kind] for kind in kinds)
    assert ours.divergence < 0.8 * four.divergence
    assert ours.bits_per_weight == four.bits_per_weight


def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = tmp_path / "text", tmp_path / "quantized"

    def line(**files: Path) -> str:
        assert quantize(**{"text": text, "output": output, **files}) == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.count("\n") == 1
        assert sorted(each.name for each in tmp_path.iterdir()) == before
        return err

    before: list[str] = []
    assert "cannot read text" in line()
    text.write_bytes(b"\xff\xfe")
    before = ["text"]
    assert "is not in UTF-8" in line()
    text.write_text("a few words")
    assert "give at least 512" in line()
    assert "there already" in line(output=text)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = ["link", "text"]
    assert "there already" in line(output=tmp_path / "link")
    assert "cannot write" in line(output=tmp_path / ("x" * 300))
    assert "cannot write" in line(output=tmp_path / "nowhere" / "quantized")
    assert "no folder or file" in line(model=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, ": No space left"),
        (OSError("the disk is gone"), 2, ": the disk is gone\n"),
        (KeyboardInterrupt(), 130, ""),
        (signal.SIGTERM, 143, ""),
        (signal.SIGHUP, 129, ""),
    ],
)
@pytest.mark.usefixtures("usual_signals")
def test_what_is_cut_off_leaves_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException | signal.Signals,
    status: int,
    message: str,
) -> None:
    """The disk fails behind the first layer, or the process is to end there."""

    def fail(file: Path, tensors: Mapping[str, WrittenTensor]) -> None:
        write_tensors(file, tensors)
        if isinstance(error, BaseException):
            raise error
        signal.raise_signal(error)

    monkeypatch.setattr(quantized_checkpoint, "write_tensors", fail)
    text = tmp_path / "text"
    text.write_text(held_text()[:4000])
    if isinstance(error, BaseException):
        assert quantize("--tokens=512", text=text, output=tmp_path / "quantized") == status
    else:
        with pytest.raises(SystemExit) as ended:
            quantize("--tokens=512", text=text, output=tmp_path / "quantized")
        assert ended.value.code == status
    assert [signal.getsignal(each) for each in SIGNALS] == [signal.SIG_DFL, signal.SIG_DFL]
    assert [each.name for each in tmp_path.iterdir()] == ["text"]
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("usual_signals")
def test_an_ignored_signal_stays_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        signal.raise_signal(signal.SIGHUP)
        raise OSError("the disk is gone")

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(quantized_checkpoint, "write_tensors", fail)
    text = tmp_path / "text"
    text.write_text(held_text()[:4000])
    assert quantize("--tokens=512", text=text, output=tmp_path / "quantized") == 2
    assert "the disk is gone" in capsys.readouterr().err


def test_no_more_of_a_text_is_read_than_its_tokens_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the text is read")

    monkeypatch.setattr(quantized_checkpoint, "write_tensors", fail)
    text, output = tmp_path / "text", tmp_path / "quantized"
    usable = ("words " * 512 * 128)[: 512 * 128]
    text.write_bytes(usable.encode() + b"\xff" * (1 << 20))
    assert quantize("--tokens=512", text=text, output=output) == 2
    assert "the text is read" in capsys.readouterr().err
